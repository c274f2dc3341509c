"""Programs kept between processes: found by what they were captured with, used while that still holds.

What a capture relied on is in its guards, which are checked on the live model. Beside these, the files of all
code that could have run are kept with the program: a file that was changed is a miss.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from whence._torch.files import is_standard_library
from whence._torch.pytrees import tree_flatten
from whence._torch.versions.release import release
from whence.dependence.code import fingerprint, is_of_dataclass
from whence.dependence.describe import expected_tensor, shown
from whence.errors import NotStorable, StaleCapture, UnreadableFile, UsageError
from whence.interop.archive.records.by_name import class_name
from whence.interop.archive.saved import bytes_of, content_of, program_of, saved_to
from whence.program import FlatProgram
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.guards.expectations import ExpectedFunction, inside_of
from whence.program.guards.rows import Violation
from whence.program.node_records import origin_of
from whence.program.state import meshes_elsewhere, state_of_loss
from whence.tracing.target.caches import open_caches

_INSTALLED = ("site-packages", "dist-packages")
_OURS = ("torch", "whence")
"""Packages whose releases are part of the key."""
Files = Mapping[str, str]
"""Files of code, each with what tells whether it was changed."""
Broken = Callable[[FlatProgram], list[Violation]]
"""The guards of a program that do not hold."""


def key_of(model: object, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]) -> str:
    """A name for captures of such a model with such arguments and options, in these releases."""
    leaves, spec = tree_flatten((args, kwargs))
    if open_caches(leaves):
        leaves, spec = tree_flatten((args, kwargs))
    facts = (
        *(release(), version("whence"), platform.python_version(), platform.machine()),
        class_name(type(model)),
        *(getattr(model, "__module__", ""), getattr(model, "__qualname__", "")),
        str(spec),
        [str(expected_tensor(leaf)) if isinstance(leaf, Tensor) else shown(leaf) for leaf in leaves],
        [(name, _option(held)) for name, held in sorted(options.items())],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _option(held: Any) -> Any:
    return (held.__qualname__, fingerprint(held)) if isinstance(held, FunctionType) else repr(held)


def option_faults(options: Mapping[str, Any]) -> Iterator[str]:
    """Why captures with such options cannot be kept."""
    if options.get("strict"):
        yield "a strict capture has no guards, so nobody can say whether it still holds"
    loss = options.get("backward", False)
    if isinstance(loss, FunctionType):
        if loss.__closure__ or loss.__defaults__ or loss.__kwdefaults__:
            yield f"the loss {loss.__qualname__} closes over values that no guard compares"
    elif not isinstance(loss, bool):
        yield f"the loss is a {type(loss).__name__}, and only functions can be compared"


@dataclass(frozen=True)
class Cache:
    """The programs in a folder that were captured under one key."""

    folder: Path
    key: str

    def found(self, model: Callable[..., Any], broken: Broken) -> FlatProgram | None:
        """The newest program that still holds, on the tensors of the model; None where there is none."""
        notes = self.folder.glob(f"{self.key}-*.json")
        for note in sorted(notes, key=_age):
            program = self._read(note, model)
            if program is not None and not broken(program):
                return program
        return None

    def keep(self, program: FlatProgram, model: Callable[..., Any], broken: Broken) -> list[str]:
        """Keep a program; why it was not, where it could not be found again."""
        files, unseen = files_of(program)
        if unseen:
            return [f"not kept: {', '.join(unseen)} cannot be read, and its code may change unseen"]
        if of_loss := state_of_loss(program):
            held = ", ".join(row.path for row in of_loss)
            return [f"not kept: the loss function holds {held}, which a kept program would not take from it"]
        try:
            content = bytes_of(program, weights=False)
        except NotStorable as error:
            return [f"not kept: {error}"]
        again, lost = program_of(content, "the cached program", model)
        lost = (*lost, *(f"a mesh of {axes}" for axes in meshes_elsewhere(again)))
        if not lost:
            lost = tuple(violation.guard.what for violation in broken(again))
        if lost:
            return [f"not kept: {', '.join(lost)} cannot be compared in another process"]
        digest = _digest(content)
        name = f"{self.key}-{digest[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be made: {error.strerror}") from error
        saved_to(self.folder / f"{name}.whence", content)
        saved_to(self.folder / f"{name}.json", json.dumps({"program": digest, "files": dict(files)}).encode())
        return []

    def _read(self, note: Path, model: Callable[..., Any]) -> FlatProgram | None:
        """A program whose code is as it was; None for one that cannot be read, or whose code is another."""
        try:
            said, content = json.loads(content_of(note)), content_of(note.with_suffix(".whence"))
            if said["program"] != _digest(content):
                return None
            if any(_state_of(name) != held for name, held in said["files"].items()):
                return None
            program, lost = program_of(content, str(note), model)
        except (UnreadableFile, StaleCapture, UsageError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return None if lost else program


def late_modules(program: FlatProgram, loaded: Container[str]) -> list[str]:
    """That other processes do not find a program, where guards look into modules which its capture loaded."""
    every = [each.guards for each in (program, *program.variants)]
    every += [guards.settled for guards in every if guards.settled is not None]
    read = dict.fromkeys(_module_of(row) for guards in every for row in guards.variables)
    if not (late := [name for name in read if name in sys.modules and name not in loaded]):
        return []
    names = ", ".join(late)
    return [
        f"found by other processes only where {names} is loaded: the model imports it first, and guards "
        f"compare what it holds; `import {names}` before whence.cached"
    ]


def _module_of(row: Outside) -> str | None:
    """The module in which a variable is looked for."""
    if row.root is not sys.modules:
        return row.root.get("__name__") if type(row.root) is dict else getattr(row.root, "__module__", None)
    match row.way:
        case (itemgetter() as first, *_):
            return first.__reduce__()[1][0]
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _age(path: Path) -> tuple[float, str]:
    try:
        return -path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name


def files_of(program: FlatProgram) -> tuple[Files, list[str]]:
    """The files of all code that a capture could have run, and those of them that nobody can read.

    These are files that origins and guards name, and of everything that is imported there, but for Python's
    own and torch's.
    """
    named = [*dict.fromkeys(name for each in (program, *program.variants) for name in _named_by(each))]
    files = {name: _state_of(name) for name in named}
    for module in _imported(named):
        name = str(getattr(module, "__file__", None) or "")
        if name and name not in files:
            files[name] = _state_of(name)
    unseen = [name for name in named if not files[name]]
    return {name: state for name, state in files.items() if state}, unseen


def _named_by(program: FlatProgram) -> Iterator[str]:
    lines = [origin_of(node).source for node in program.nodes()]
    lines += [*program.asked, *(guard.source for guard in program.guards)]
    for line in (line for line in lines if line is not None and _is_watched(line.file)):
        if not is_of_dataclass(line.file, line.function):
            yield line.file
    kinds = {kind for holder in program.guards.holders for kind in holder.type.__mro__}
    functions = [target for guard in program.guards for target in _functions_expected(guard.expected)]
    if program.loss_function is not None:
        functions.append(program.loss_function)
    for thing in (*kinds, *functions):
        module = sys.modules.get(str(getattr(thing, "__module__", None)))
        name = str(getattr(module, "__file__", None) or "")
        code = getattr(getattr(thing, "__code__", None), "co_filename", "")
        if name and code.startswith("<"):  # made by code of that file: a guard compares what it runs
            code = ""
        yield from (each for each in (name, code) if each and _is_watched(each))


def _functions_expected(expected: Any) -> Iterator[Any]:
    if isinstance(expected, ExpectedFunction):
        yield expected.target
    for inside in inside_of(expected):
        yield from _functions_expected(inside)


def _is_watched(file: str) -> bool:
    """Whether code in a file may change while releases stay: not Python's, torch's, or what has no file."""
    if is_standard_library(file) or file.startswith("<frozen "):
        return False
    return not any(file.startswith(folder) for folder in _folders())


def _folders() -> Iterator[str]:
    for package in _OURS:
        name = getattr(sys.modules.get(package), "__file__", None)
        if name:
            yield f"{Path(name).parent}{os.sep}"


def _imported(files: Iterable[str]) -> Iterator[ModuleType]:
    """The modules in these files, and those whose names they hold, and so on."""
    wanted = frozenset(files)
    waiting = [module for module in list(sys.modules.values()) if _file_of(module) in wanted]
    seen = set[int]()
    for module in waiting:  # which grows
        if id(module) in seen or not _is_watched(_file_of(module)):
            continue
        seen.add(id(module))
        yield module
        waiting += [other for other in _named_in(module) if id(other) not in seen]


def _file_of(module: Any) -> str:
    held = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return held if isinstance(held, str) else ""


def _named_in(module: ModuleType) -> Iterator[ModuleType]:
    for held in list(vars(module).values()):
        if isinstance(held, ModuleType):
            yield held
            continue
        thing = held if isinstance(held, type | FunctionType) else type(held)
        other = sys.modules.get(str(thing.__module__))
        if other is not None and _file_of(other):
            yield other


def _state_of(file: str) -> str:
    """What tells whether a file was changed: its content, or of an installed one its time and length."""
    path = Path(file)
    try:
        if any(part in _INSTALLED for part in path.parts):
            found = path.stat()
            return f"{found.st_mtime_ns}:{found.st_size}"
        return _digest(path.read_bytes())
    except OSError:
        return ""

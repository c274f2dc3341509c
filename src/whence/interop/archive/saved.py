"""A program in a file, and back: the table of contents of this room."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from torch import Tensor

from whence._torch.observe.training_steps import all_members_of
from whence._torch.subclasses.fully_sharded import is_distributed
from whence._torch.subclasses.spread import meshes_of
from whence._torch.versions.release import release
from whence.errors import Fault, NotStorable, StaleCapture, UnreadableFile, UsageError
from whence.interop.archive import tensors
from whence.interop.archive.consistency import refuse_inconsistent
from whence.interop.archive.container import PROGRAM, TENSORS, not_readable, packed, unpacked
from whence.interop.archive.graphs.reading import GraphReader
from whence.interop.archive.graphs.writing import GraphWriter
from whence.interop.archive.records.checked import (
    Unreadable,
    listed,
    mapping,
    number,
    raise_unless,
    text,
    truth,
)
from whence.interop.archive.records.forms import Form, form_of
from whence.interop.archive.records.names import Described, LoadedNames
from whence.interop.archive.records.reached import Way
from whence.interop.archive.records.reading import Reader
from whence.interop.archive.records.writing import Writer
from whence.interop.archive.results import otherwise
from whence.program import FlatProgram
from whence.program.guards.rows import Holder
from whence.program.names import NamedOnly, Said
from whence.program.replay import Replays
from whence.program.signature import Part
from whence.program.state import bound_state, state_of_loss
from whence.schema import InputKind
from whence.tracing.sandbox.capture_lock import without_collection
from whence.tracing.steps.enclosed_state import functions_of, wrappers_of
from whence.tracing.target.loss_state import tensors_of_loss_by_name
from whence.tracing.target.subject import Subject, subject_of, tensors_by_name

FORMAT, VERSION = "whence program", 1
_FIELDS = (
    *("signature", "calls", "convention", "result", "modules", "guards", "step", "circumstances", "history"),
)
_HINTS = get_type_hints(FlatProgram)
_FORMS: Mapping[str, Form] = MappingProxyType({name: form_of(_HINTS[name]) for name in _FIELDS})
"""What each field may hold; found before any file is read, for Python evaluates the name of a class in it."""
_LATER = frozenset({"history"})
"""Fields that files of version 1 may be without."""
_FORMER: Mapping[str, Form] = MappingProxyType({"replay": form_of(Replays)})
"""Circumstances that files of version 1 may hold beside the others."""
_BROKEN = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
    *(RuntimeError, AssertionError, SyntaxError, NotImplementedError),
)
"""What reading a broken file may come to, in Python, torch and sympy: it is the file's fault."""


def bytes_of(program: FlatProgram, *, weights: bool) -> bytes:
    """The bytes of a file that holds a program; raises `NotStorable` naming all that it cannot hold."""
    return without_collection(partial(_packed_program, program, weights=weights))


def _packed_program(program: FlatProgram, *, weights: bool) -> bytes:
    data, numbers = _data_of(program, weights=weights)
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return packed({PROGRAM: plain.encode(), TENSORS: numbers})


def _data_of(program: FlatProgram, *, weights: bool) -> tuple[dict[str, Any], bytes]:
    stored = _stored(program, weights=weights)
    of_variants = {
        f"{_prefix(position)}{name}": held
        for position, each in enumerate(program.variants)
        for name, held in _stored(each, weights=weights).items()
    }
    rows, numbers, faults = tensors.written({**stored, **of_variants})
    plain = _program_as_data(program, faults)
    if program.variants:
        plain["variants"] = [_program_as_data(each, faults) for each in program.variants]
    NotStorable.refuse(faults)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "torch": release(),
        "name": program.name,
        "weights": all(row.name in stored for row in program.signature.state),
    }
    return {**head, **plain, "tensors": rows}, numbers


def _program_as_data(program: FlatProgram, faults: list[Fault]) -> dict[str, Any]:
    """A program without its tensors; notes among the faults what cannot be stored."""
    writer = Writer(_described_by_name(program))
    graphs = GraphWriter(writer, frozenset(row.name for row in program.signature.attributes))
    graphs.write(program.graph_module)
    parts = {name: form.write(writer, getattr(program, name)) for name, form in _FORMS.items()}
    for whole in program.signature.wholes:
        if whole.tensor is not None and not is_distributed(whole.tensor):
            why = "it is made of others, by a class of which a file has the name"
            writer.refuse(f"the tensor {whole.path}", why)
    apart = program.circumstances.unread
    unread = {} if apart is None else {"unread": graphs.write(apart)}
    faults += writer.faults
    return {**parts, **unread, "graphs": graphs.graphs, "tables": writer.tables()}


def _prefix(position: int) -> str:
    """What comes before the names of a variant's tensors."""
    return f"variants.{position}."


def _stored(program: FlatProgram, *, weights: bool) -> Mapping[str, Tensor]:
    """The tensors that go into the file: constants are part of the program, and so are tensors of its loss
    function, which no model has, whatever becomes of weights."""
    kinds = {row.name: row.kind for row in program.signature.state}
    of_loss = {row.name for row in state_of_loss(program)}
    left_out = () if weights else (InputKind.PARAMETER, InputKind.BUFFER)
    wholes = {whole.name for whole in program.signature.wholes}
    return {
        name: held
        for name, held in program.state.items()
        if name not in wholes and (kinds.get(name) not in left_out or name in of_loss)
    }


def _described_by_name(program: FlatProgram) -> Described:
    classes = {holder.type: _way_to_class(holder) for holder in program.guards.holders[::-1]}
    if program.step is not None:
        classes |= {type(each): () for each in all_members_of(program.step.optimizer)}
    functions = (
        () if program.step is None else (*wrappers_of(program.step.call), *functions_of(program.step.call))
    )
    model = None if program.guards.of is None else program.guards.of.target()
    tensors = {id(held): name for name, held in program.state.items()}
    said = program.guards.said or Said()
    return Described(tensors, classes, functions, model, program.loss_function, said)


def _way_to_class(holder: Holder) -> Way:
    """Where the class of a module is in its model, which may be gone; empty for that of another object, and
    for what a file calls a class.
    """
    names = holder.path.split(".") if holder.path else []
    way = chain.from_iterable(("_modules", name) for name in names)
    return (*way, "__class__") if holder.is_module and not issubclass(holder.type, NamedOnly) else ()


# --- and back ----------------------------------------------------------------------------------------


class Unsaved(dict[str, Tensor]):
    """The state of a program of which not all was saved; what is not there says how to come by it."""

    def __missing__(self, name: str) -> Tensor:
        raise UsageError(
            f"the program was saved without its weights, and {name} is one",
            remedy="whence.load(path, model=...) gives it those of a model",
        )


@dataclass(frozen=True)
class Beside:
    """What a file is read with: the live model, its loss function if it is given, and whether the program
    gets their tensors."""

    subject: Subject
    binds: bool = True
    loss: Callable[..., Any] | None = None

    def names(self) -> LoadedNames:
        """What classes, functions and variables of the file are here."""
        roots, modules = self.subject.roots, [module for _, module in self.subject.named_modules()]
        return LoadedNames.beside(modules, roots[0][1] if roots else self.subject.call, self.loss)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are here, by name."""
        of_loss = {} if self.loss is None else tensors_of_loss_by_name(self.loss, self.subject)
        return {**of_loss, **tensors_by_name(self.subject)}


def program_of(
    content: bytes,
    name: str,
    model: Callable[..., Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    binds: bool = True,
) -> tuple[FlatProgram, tuple[str, ...]]:
    """The program that the bytes of a file hold, and what of its guards cannot be compared any more.

    With a `model` its guards speak of what is loaded, and it has the tensors of that, by qualified name, or
    with `binds=False` those of the file. A `loss` is its loss function from then on, in the same way.
    Raises `UnreadableFile` for anything else than a saved program, and for one that needs what this process
    does not have, all of which it names; and `StaleCapture` naming every tensor that does not fit.
    """
    beside = None if model is None else Beside(subject_of(model), binds, loss)
    members = unpacked(content, name)
    try:
        return without_collection(partial(_read_members, members, name, beside))
    except _BROKEN as error:
        if isinstance(error, UnreadableFile):
            raise
        raise not_readable(name, _why(error)) from error


def _read_members(
    members: Mapping[str, bytes], name: str, beside: Beside | None
) -> tuple[FlatProgram, tuple[str, ...]]:
    data = mapping(json.loads(members[PROGRAM].decode()))
    raise_unless(data["format"] == FORMAT, "it holds something else")
    if number(data["version"]) > VERSION:
        raise UnreadableFile(
            f"{name} is of version {data['version']}, and this release of whence reads up to {VERSION}",
            remedy="load it with the release of whence that saved it, or a newer one",
        )
    return _program(data, members.get(TENSORS), name, beside)


def _why(error: BaseException) -> str:
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, Unreadable) else f"{type(error).__name__}: {words}"


def _program(
    data: dict[str, Any], numbers: bytes | None, name: str, beside: Beside | None
) -> tuple[FlatProgram, tuple[str, ...]]:
    stored = tensors.read(data["tensors"], numbers)
    head = {"torch": data["torch"], "weights": data["weights"]}
    others = [{**head, **mapping(each)} for each in listed(data.get("variants", []))]
    prefixes = [_prefix(position) for position, _ in enumerate(others)]
    own = {key: held for key, held in stored.items() if not key.startswith(tuple(prefixes))}
    program, lost = _one(data, own, name, beside)
    variants = [
        _one(other, _tensors_of_variant(prefix, stored), name, beside)
        for prefix, other in zip(prefixes, others, strict=True)
    ]
    lost = tuple(dict.fromkeys((*lost, *(what for _, lost in variants for what in lost))))
    return program.with_changes(variants=tuple(variant for variant, _ in variants)), lost


def _tensors_of_variant(prefix: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a variant, by their names in it."""
    return {key.removeprefix(prefix): held for key, held in stored.items() if key.startswith(prefix)}


def _one(
    data: dict[str, Any], stored: dict[str, Tensor], name: str, beside: Beside | None
) -> tuple[FlatProgram, tuple[str, ...]]:
    """The program itself, or a variant, on its tensors."""
    found = LoadedNames() if beside is None else beside.names()
    found.said.file = name
    named = {} if beside is None else beside.tensors()
    reader = Reader(
        mapping(data["tables"]), found, stored, text(data["torch"]), meshes=meshes_of(named.values())
    )
    reader.read_tables()
    signature = _FORMS["signature"].read(reader, data["signature"])
    held = {row.path: stored.get(row.name, row.value) for row in signature.attributes}
    graphs = GraphReader(reader, listed(data["graphs"]), held)
    graphs.read_tables()
    module = graphs.read(0)
    unread = graphs.read(number(data["unread"])) if "unread" in data else None
    if graphs.missing:
        raise _misses(graphs.missing, name, reader.release)
    there = [each for each in _FIELDS if each != "signature" and (each in data or each not in _LATER)]
    parts = {each: _FORMS[each].read(reader, data[each]) for each in there}
    parts["guards"] = replace(parts["guards"], said=found.said)
    program = FlatProgram(graph_module=module, signature=signature, state=stored, **parts)
    program = program.under(unread=unread)
    former = {each: form.read(reader, data[each]) for each, form in _FORMER.items() if each in data}
    program = program.under(**former) if former else program
    refuse_inconsistent(program, is_complete=truth(data["weights"]))
    for what in otherwise(reader.mode, graphs.distinct.values(), of_this_release=reader.release == release()):
        raise Unreadable(what)
    state = _bound(program, named, name) if beside is not None and beside.binds else stored
    complete = {row.name for row in signature.state} <= state.keys()
    wholes = tuple(replace(whole, tensor=state.get(whole.name)) for whole in signature.wholes)
    program = program.with_changes(
        state=state if complete else Unsaved(state), signature=replace(signature, wholes=wholes)
    )
    if beside is not None and beside.loss is not None:
        program = program.under(loss_function=beside.loss)
    return program, tuple(found.lost)


def _misses(missing: list[str], name: str, torch: str) -> UnreadableFile:
    return UnreadableFile(
        f"{name} needs {', '.join(dict.fromkeys(missing))}",
        why=f"this process (PyTorch {release()}) has no such thing; it was saved with {torch}",
        remedy="import the package that registers them first (commands do with --import), or capture the "
        "model again",
    )


def _bound(program: FlatProgram, named: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The state with the model's own tensors; raises `StaleCapture` naming every one that does not fit."""
    faults = []
    for row in program.signature.state:
        held = next((named[path] for path in (row.path, *row.aliases) if path in named), None)
        if held is None and row.name not in program.state:
            faults.append(f"{row.path} is not there")
        elif held is not None and (held.shape, held.dtype) != (row.value.shape, row.value.dtype):
            faults.append(f"{row.path} is {tuple(held.shape)} {held.dtype}")
    faults += _spread_otherwise(program, named)
    if faults:
        raise StaleCapture(
            f"{name} does not fit the model: {'; '.join(faults)}", remedy="capture the model again"
        )
    return bound_state(program.with_changes(state=Unsaved(program.state)), named)


def _spread_otherwise(program: FlatProgram, named: Mapping[str, Tensor]) -> Iterator[str]:
    """DTensors of a model over other processes, or otherwise over them, than those of the program."""
    parts = {row.name: row.part for row in program.signature.state}
    for whole in program.signature.wholes:
        part, tensor = parts.get(whole.parts[0]), named.get(whole.path)
        if part is not None and tensor is not None:
            found = Part.of(part.whole, tensor, part.access, requires_grad=part.requires_grad)
            if (found, found.groups, found.place) != (part, part.groups, part.place):
                at = ", ".join(map(str, found.place))
                yield f"{whole.path} is {found} (of the groups {', '.join(found.groups)}, at the place {at})"


def saved_to(path: str | Path, content: bytes) -> None:
    """Write a file, whole or not at all; raises `UsageError` where none can be written."""
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def content_of(path: str | Path) -> bytes:
    """The bytes of a file; raises `UsageError` where there is none."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error

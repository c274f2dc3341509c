"""What a step closes over beside the model: a trainer, a schedule, lists and counters.

They are given back as they were. What a program cannot do again in every run is refused: what the step did
there may decide what it does next time.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.elsewhere.recorder import SCALER, WITHOUT_SCALER
from whence._torch.files import is_installed, is_library
from whence._torch.observe.attribute_reads import NOTHING, has_attributes, is_observable, own_attributes
from whence._torch.observe.training_steps import is_around_another, schedules_in
from whence.dependence.code import codes_in, function_in, globals_within, names_in
from whence.dependence.describe import hook_rows
from whence.dependence.snapshots import (
    ARRAY,
    ATTRIBUTES,
    CACHED,
    CELL,
    CLASS,
    CONTAINER,
    CONTAINERS,
    NUMPY_RANDOM,
    PYTHON_RANDOM,
    SLOTS,
    VARIABLE,
    NamespaceEntry,
    Saved,
    containers_saved,
    content_of_cell,
    kinds_of,
    save,
    save_all,
    way_back,
)
from whence.errors import Place, UnsupportedStep, UsageError
from whence.provenance import ModulePath
from whence.tracing.reads.held_values import spelled_in
from whence.tracing.reads.outside.modules import OF_MODULES
from whence.tracing.reads.type_queries import is_answer
from whence.tracing.sandbox.module_snapshot import ModuleCopy, object_kept

_THEIRS = (GradScaler, LRScheduler)
_WHOLE = frozenset({ARRAY, CLASS, PYTHON_RANDOM, NUMPY_RANDOM})
"""State of which no change is repeated."""
_MOST = 10_000
"""Things that are looked at."""
_NOT_LOOKED_INTO = (Tensor, nn.Module, Optimizer, ModuleType, FunctionType, type, Logger)


class Enclosed:
    """Everything that a step closes over, as it was; `theirs` is what objects of PyTorch's hold.

    `reached` are things that the step came to on its way, which are looked at from then on. `caches` of calls
    may be filled: they are emptied, and asked again in every run. `files` are variables of other files, which
    no step changes; `objects` are held by the model.
    """

    def __init__(self, rows: Iterable[Saved], theirs: Iterable[Saved] = ()) -> None:
        self.rows, self.caches = list[Saved](), list[Saved]()
        self._add(rows)
        self.theirs = [*theirs]
        self.files: dict[tuple[int, str], Saved] = {}
        self._spelled = set[str]()
        self.reached: list[tuple[str | ModulePath, Any]] = []
        self.objects: list[ModuleCopy] = []
        self._known = {each for row in (*self.rows, *self.theirs) for each in _identities(row)}

    def reach(self, path: str | ModulePath, thing: Any) -> None:
        """The step comes to a thing, to a function with variables of its own, or to an object that the model
        holds at a path."""
        if id(thing) in self._known:
            return
        self.reached.append((path, thing))
        if isinstance(path, ModulePath) and has_attributes(thing):
            self.objects.append(object_kept(path, thing))
        said, is_function = str(path), isinstance(thing, FunctionType)
        found = _state_of_function(said, thing) if is_function else _state_of(said, thing)
        new = self.look_at(found)
        self._known.add(id(thing))
        self.spell([thing] if is_function else [])
        for row in new if is_function else ():
            if row.kind is not ATTRIBUTES and (has_state(row.before) or is_looked_at_whole(row.before)):
                self.reach(row.path, row.before)

    def spell(self, functions: Iterable[FunctionType]) -> None:
        """What these functions spell they may change, in files that they or others name."""
        codes = (code for function in functions for code in codes_in(function.__code__))
        self._spelled.update(name for code in codes for name in names_in(code))

    def see_file(self, file: ModuleType, names: Iterable[str]) -> None:
        """The step comes to variables of a file."""
        for name in names:
            row = save(name, NamespaceEntry(vars(file), name))[0]
            self.files.setdefault((id(file), name), row)

    def _add(self, rows: Iterable[Saved]) -> None:
        for row in rows:
            (self.caches if row.kind is CACHED else self.rows).append(row)

    def look_at_modules(self, name: str, modules: Iterable[tuple[ModulePath, nn.Module]]) -> None:
        """Attributes of the model, and containers among them, are as good as those of a trainer."""
        for path, module in modules:
            held = str(path) if path else name
            plain = {key: value for key, value in own_attributes(module).items() if key not in OF_MODULES}
            within = [
                (f"{held}.{key}", value) for key, value in plain.items() if isinstance(value, CONTAINERS)
            ]
            rows = [Saved(held, module, ATTRIBUTES, dict(own_attributes(module)))]
            self.look_at([*rows, *containers_saved(within, keyed=True)])

    def look_at(self, rows: Iterable[Saved]) -> list[Saved]:
        """Look at more that is known as it was; gives what of it is new."""
        new = [row for row in rows if _identities(row)[0] not in self._known]
        self._known |= {each for row in new for each in _identities(row)}
        self._add(new)
        return new

    def look_everywhere(self, is_theirs: Callable[[object], bool] | None = None) -> None:
        """Look at all that what is known leads to, and functions that are the user's: code that runs where
        nobody watches may change it."""
        seen, is_theirs = 0, is_theirs or _is_theirs
        while seen < min(len(self.rows), _MOST):
            row = self.rows[seen]
            seen += 1
            for value in without_tuples(row.held()):
                held = getattr(value, "__self__", None) if isinstance(value, MethodType) else value
                if has_state(held) or is_looked_at_whole(held) or is_theirs(held):
                    self.reach(row.path, held)
        spelled = frozenset(self._spelled)
        for file in {row.before: None for row in self.rows if isinstance(row.before, ModuleType)}:
            if not is_library(file.__name__):
                self.see_file(file, spelled_in(vars(file), spelled))

    def restore(self) -> None:
        """Give all of it back."""
        self.way_back()()

    def way_back(self) -> Callable[[], None]:
        """A way back to what was there of all that is known by now."""
        return way_back((*self.rows, *self.theirs, *self.caches, *self.files.values()))

    def has_changed(self, thing: object, name: str) -> bool:
        """Whether a thing that was looked at holds something else under a name now."""
        held = own_attributes(thing)  # which several instances may have in common
        rows = (
            row for row in self.rows if row.kind in (ATTRIBUTES, SLOTS) and type(row.thing) is type(thing)
        )
        rows = (row for row in rows if row.thing is thing or own_attributes(row.thing) is held)
        return any(name in row.keys_changed() for row in rows)

    def renewed(self) -> set[str]:
        """Attributes that held an empty container, and hold another: it was filled for the step alone."""
        return set(self._renewed())

    def _renewed(self) -> Iterator[str]:
        rows = (*self.rows, *self.theirs)
        empty = {id(row.thing) for row in rows if row.kind is CONTAINER and not row.before}
        for row in rows:
            if row.kind is not ATTRIBUTES:
                continue
            now = row.kind.read(row.thing)
            for name, then in row.before.items():
                other = now.get(name)
                if id(then) in empty and type(other) is type(then) and not other:
                    yield f"{row.path}.{name}"


def around_modules(modules: Iterable[tuple[ModulePath, nn.Module]]) -> Enclosed:
    """All that the user's code of modules and their hooks leads to, and what the modules hold."""
    found, modules = Enclosed([]), list(modules)
    found.look_at_modules("the model", modules)
    kinds = {type(module): module for _, module in modules}
    methods = {base: None for kind in kinds for base in kind.__mro__ if not is_library(base.__module__)}
    called = [held for base in methods for held in vars(base).values()]
    called += [hook for _, module in modules for _, hook in hook_rows(module)]
    for held in called:
        if has_state(owner := getattr(held, "__self__", held)):
            found.reach("a hook", owner)
        for function in filter(_is_written, functions_of(function_in(held) or held)):
            found.reach(function.__name__, function)
    found.look_everywhere(_is_written)
    return found


def refuse_changed(names: Iterable[str], place: Place, *, always: bool = False) -> None:
    """Raise `UnsupportedStep` if there are any; a second step may not change them, unless `always`."""
    if changed := list(dict.fromkeys(names)):
        raise UnsupportedStep(
            f"the step changes {', '.join(changed)}",
            where=place,
            why="a program changes tensors and numbers, puts things under names and keys, and appends to "
            "lists; all else the next step would find as it was",
            remedy="do it outside the captured step; where only the first step does it, take one before",
        ).in_first_step(holds=not always)


def enclosed_by(step: Callable[..., Any]) -> Enclosed:
    """Look at what a step closes over."""
    variables = [row for function in functions_of(step) for row in variables_of(function)]
    held = {row.path: row.before for row in variables} | dict(owners_of(step))
    held |= dict(_schedules_held(held))
    held |= dict(_chained(held))
    things: dict[int, tuple[str, Any]] = {}
    owners = {id(owner) for _, owner in owners_of(step) if isinstance(owner, nn.Module)}
    for name, value in held.items():
        if has_state(value) or id(value) in owners or is_looked_at_whole(value):
            things.setdefault(id(value), (name, value))
    for name, owner in owners_of(step):
        things.setdefault(id(type(owner)), (name, type(owner))) if is_observable(type(owner)) else None
    objects = [(row, value) for name, value in things.values() for row in _state_of(name, value)]
    ours = [row for row, value in objects if not isinstance(value, _THEIRS)]
    theirs = [row for row, value in objects if isinstance(value, _THEIRS)]
    enclosed = Enclosed((*variables, *ours), theirs)
    enclosed.spell(functions_of(step))
    return enclosed


def _state_of(path: str, thing: Any) -> list[Saved]:
    """A thing as it is: attributes, containers among them, numbers of an array or a generator, a cache."""
    whole = [row for row in save(path, thing) if row.kind in _WHOLE or row.kind is CACHED]
    return whole if isinstance(thing, type) else [*save_all(path, thing), *whole]


def _state_of_function(path: str, function: FunctionType) -> list[Saved]:
    """Its variables, and attributes that it was given."""
    return [*variables_of(function), Saved(path, function, ATTRIBUTES, dict(own_attributes(function)))]


def is_looked_at_whole(value: Any) -> bool:
    """Whether it is a class of the user's, an array, a generator, or an object with slots."""
    kind = value if isinstance(value, type) else type(value)
    kinds = (_WHOLE | {SLOTS}).intersection(kinds_of(value))
    return not kinds <= {SLOTS, CLASS} or (bool(kinds) and is_observable(kind))


def _identities(row: Saved) -> tuple[int, ...]:
    """What a row is about: of the variables of a file each by itself, and of attributes where they are kept,
    which several instances may have in common; then the thing itself."""
    if row.kind is VARIABLE:
        return (hash((id(row.thing.namespace), row.thing.name)),)
    if row.kind is ATTRIBUTES and has_attributes(row.thing):
        return id(own_attributes(row.thing)), id(row.thing)
    return (id(row.thing),)


def _schedules_held(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """PyTorch's schedules and scalers that objects hold: nobody watches the code of theirs that runs."""
    for name, owner in held.items():
        inner = own_attributes(owner) if has_state(owner) and has_attributes(owner) else {}
        yield from ((f"{name}.{key}", value) for key, value in inner.items() if isinstance(value, _THEIRS))


def _chained(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schedules that schedules are made of."""
    for name, schedule in held.items():
        inner = schedules_in(schedule) if isinstance(schedule, LRScheduler) else ()
        yield from ((f"{name}[{at}]", value) for at, value in enumerate(inner))


def scales_of(step: Callable[..., Any]) -> Iterator[Tensor]:
    """What scalers of gradients hold that a step closes over, itself or in an object."""
    for scaler in _scalers_of(step):
        yield from (value for value in own_attributes(scaler).values() if isinstance(value, Tensor))


def begin_scales(step: Callable[..., Any], device: torch.device) -> None:
    """A scaler makes its scale when it is first asked to scale: the same number, which programs write."""
    for scaler in _scalers_of(step):
        if not any(isinstance(value, Tensor) for value in own_attributes(scaler).values()):
            scaler.scale(torch.zeros((), device=device))


def refuse_scalers(step: Callable[..., Any]) -> None:
    """Raise `UsageError` for a scaler of gradients that a step closes over, also one that is turned off."""
    if any(True for _ in _scalers_of(step)):
        raise UsageError("the step holds a GradScaler", why=SCALER, remedy=WITHOUT_SCALER)


def _scalers_of(step: Callable[..., Any]) -> Iterator[GradScaler]:
    held = {row.path: row.before for function in functions_of(step) for row in variables_of(function)}
    held |= dict(owners_of(step))
    values = (*held.values(), *(value for _, value in _schedules_held(held)))
    return (value for value in values if isinstance(value, GradScaler))


def without_tuples(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from without_tuples(value) if isinstance(value, tuple) else (value,)


def _is_theirs(value: object) -> bool:
    """A function of the user's, which has variables of its own."""
    return isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] not in (
        "torch",
        "whence",
    )


def _is_written(value: object) -> bool:
    """The same, and in no package that is installed."""
    return _is_theirs(value) and not is_installed(value.__code__.co_filename)  # type: ignore[attr-defined]


def has_state(value: Any) -> bool:
    """Whether a value may be changed by who holds it, and is not looked at elsewhere, as an optimizer is,
    but for one that only stands for another."""
    if isinstance(value, _NOT_LOOKED_INTO) and not is_around_another(value):
        return False
    return isinstance(value, CONTAINERS) or has_attributes(value)


def wrappers_of(step: Any) -> Iterator[Any]:
    """The functions that decorators put around a step, the outermost first."""
    while isinstance(step, functools.partial):
        step = step.func
    step = getattr(step, "__func__", step)
    while (inside := getattr(step, "__wrapped__", None)) is not None:
        yield step
        step = inside


def functions_of(step: Any) -> Iterator[FunctionType]:
    """The function behind a method, a partial, or a decorator; that of an object that is called."""
    while isinstance(step, functools.partial):
        step = step.func
    step = inspect.unwrap(getattr(step, "__func__", step))
    found = step if isinstance(step, FunctionType) else vars(type(step)).get("__call__")
    if isinstance(found, FunctionType):
        yield found


def variables_of(function: FunctionType) -> Iterator[Saved]:
    """The names that a function has from outside: of the functions around it, and of its file."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (held := content_of_cell(cell)) is not NOTHING:
            yield Saved(name, cell, CELL, held)
    space = function.__globals__
    names = [name for name in sorted(globals_within(function.__code__)) if name in space]
    held = ((name, space[name]) for name in names if not is_answer(space[name]))
    yield from (Saved(name, NamespaceEntry(space, name), VARIABLE, value) for name, value in held)


def owners_of(step: Any) -> Iterator[tuple[str, Any]]:
    """Whose method it is, what a partial was given, defaults, and an object that is called itself."""
    while isinstance(step, functools.partial):
        yield from ((f"args[{at}]", value) for at, value in enumerate(step.args))
        yield from step.keywords.items()
        step = step.func
    for function in functions_of(step):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
    owner = getattr(step, "__self__", None if isinstance(step, FunctionType) else step)
    if owner is not None:
        yield type(owner).__name__, owner

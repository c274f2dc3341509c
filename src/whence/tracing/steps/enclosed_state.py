"""What a step closes over beside the model: a trainer, a schedule, lists and counters.

A program repeats no change of these. They are given back as they were, and a step that changes one is
refused, for what it did may decide what it does next time.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from dis import get_instructions
from logging import Logger
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.observe.attribute_reads import NOTHING, has_attributes, own_attributes
from whence.dependence.snapshots import (
    ATTRIBUTES,
    CELL,
    CONTAINER,
    CONTAINERS,
    VARIABLE,
    NamespaceEntry,
    Saved,
    content_of_cell,
    save_all,
)
from whence.errors import Place, UnsupportedStep

_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_NOT_LOOKED_INTO = (Tensor, nn.Module, Optimizer, ModuleType, FunctionType, type, Logger)


@dataclass(frozen=True)
class Enclosed:
    """Everything that a step closes over, as it was."""

    rows: tuple[Saved, ...]

    def restore(self) -> None:
        """Give all of it back."""
        for row in self.rows:
            row.restore()

    def refuse_changes(self, place: Place) -> None:
        """Raise `UnsupportedStep` naming everything that the step has changed."""
        changed = [row for row in self.rows if not row.is_unchanged]
        renewed = set(self._renewed())
        names = (name for row in changed for name in row.changed_names())
        refuse_changed((name for name in names if name not in renewed), place)

    def _renewed(self) -> Iterator[str]:
        """Attributes that held an empty container, and hold another: it was filled for the step alone."""
        empty = {id(row.thing) for row in self.rows if row.kind is CONTAINER and not row.before}
        for row in self.rows:
            if row.kind is not ATTRIBUTES:
                continue
            now = row.kind.read(row.thing)
            for name, then in row.before.items():
                other = now.get(name)
                if id(then) in empty and type(other) is type(then) and not other:
                    yield f"{row.path}.{name}"


def refuse_changed(names: Iterable[str], place: Place) -> None:
    """Raise `UnsupportedStep` if there are any."""
    if changed := list(dict.fromkeys(names)):
        raise UnsupportedStep(
            f"the step changes {', '.join(changed)}",
            where=place,
            why="a program changes tensors, and nothing else, so the next step would find it as it was",
            remedy="do it outside the captured step; where only the first step does it, take one before",
        )


def enclosed_by(step: Callable[..., Any]) -> Enclosed:
    """Look at what a step closes over."""
    variables = [row for function in functions_of(step) for row in variables_of(function)]
    held = {row.path: row.before for row in variables} | dict(owners_of(step))
    held |= dict(_inside(held))
    things: dict[int, tuple[str, Any]] = {}
    for name, value in held.items():
        if has_state(value):
            things.setdefault(id(value), (name, value))
    objects = [row for name, value in things.values() for row in save_all(name, value)]
    return Enclosed((*variables, *objects))


def _inside(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """PyTorch's schedules and scalers that objects hold: nobody watches the code of theirs that runs."""
    for name, owner in held.items():
        inner = own_attributes(owner) if has_state(owner) and has_attributes(owner) else {}
        for key, value in inner.items():
            if isinstance(value, GradScaler | LRScheduler):
                yield f"{name}.{key}", value


def scales_of(step: Callable[..., Any]) -> Iterator[Tensor]:
    """What scalers of gradients hold that a step closes over, itself or in an object."""
    held = {row.path: row.before for function in functions_of(step) for row in variables_of(function)}
    held |= dict(owners_of(step))
    for scaler in (*held.values(), *(value for _, value in _inside(held))):
        if isinstance(scaler, GradScaler):
            yield from (value for value in own_attributes(scaler).values() if isinstance(value, Tensor))


def has_state(value: Any) -> bool:
    """Whether a value may be changed by who holds it, and is not looked at elsewhere."""
    is_looked_into = isinstance(value, CONTAINERS) or has_attributes(value)
    return is_looked_into and not isinstance(value, _NOT_LOOKED_INTO)


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
    names = [name for name in globals_of(function.__code__) if name in space]
    yield from (Saved(name, NamespaceEntry(space, name), VARIABLE, space[name]) for name in names)


def globals_of(code: CodeType) -> dict[str, None]:
    """The names of its file that code uses, or the functions in it; attributes are often called alike."""
    names = {row.argval: None for row in get_instructions(code) if row.opname in _GLOBAL}
    for inner in code.co_consts:
        names |= globals_of(inner) if isinstance(inner, CodeType) else {}
    return names


def owners_of(step: Any) -> Iterator[tuple[str, Any]]:
    """Whose method it is, what a partial was given, defaults, and an object that is called itself."""
    while isinstance(step, functools.partial):
        yield from ((f"args[{at}]", value) for at, value in enumerate(step.args))
        yield from step.keywords.items()
        step = step.func
    yield from _defaults(step)
    owner = getattr(step, "__self__", None if isinstance(step, FunctionType) else step)
    if owner is not None:
        yield type(owner).__name__, owner


def _defaults(step: Any) -> Iterator[tuple[str, Any]]:
    """What arguments are where nobody gives them."""
    for function in functions_of(step):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()

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
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from whence._torch.observe.attribute_reads import has_attributes
from whence.errors import Place, UnsupportedStep
from whence.provenance import ModulePath
from whence.tracing.sandbox.module_snapshot import (
    CONTAINERS,
    Content,
    ModuleCopy,
    contents_of,
    object_kept,
    way_back,
)

_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_NOT_LOOKED_INTO = (Tensor, nn.Module, Optimizer, ModuleType, FunctionType, type, Logger)


@dataclass(frozen=True)
class StepVariable:
    """A name that the step reads outside of itself: where it is held, and what it was."""

    name: str
    holder: CellType | dict[str, Any]
    value: Any

    @property
    def is_unchanged(self) -> bool:
        """Whether it is still the same object."""
        now = self.holder.get(self.name) if isinstance(self.holder, dict) else self.holder.cell_contents
        return now is self.value

    def restore(self) -> None:
        """Give it back."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = self.value
        else:
            self.holder.cell_contents = self.value


@dataclass(frozen=True)
class Around:
    """Everything around a step, as it was."""

    variables: tuple[StepVariable, ...]
    objects: tuple[ModuleCopy, ...]

    def restore(self) -> None:
        """Give all of it back."""
        for variable in self.variables:
            if not variable.is_unchanged:
                variable.restore()
        way_back(self.objects)()

    def refuse_changes(self, place: Place) -> None:
        """Raise `UnsupportedStep` naming everything that the step has changed."""
        changed = [variable.name for variable in self.variables if not variable.is_unchanged]
        changed += [name for kept in self.objects for name in _changed(kept)]
        refuse_changed(changed, place)


def refuse_changed(names: Iterable[str], place: Place) -> None:
    """Raise `UnsupportedStep` if there are any."""
    if changed := list(dict.fromkeys(names)):
        raise UnsupportedStep(
            f"the step changes {', '.join(changed)}",
            where=place,
            why="a program changes tensors, and nothing else, so the next step would find it as it was",
            remedy="do it outside the captured step; where only the first step does it, take one before",
        )


def around(step: Callable[..., Any]) -> Around:
    """Look at what a step closes over."""
    variables = tuple(row for function in functions_of(step) for row in variables_of(function))
    held = {row.name: row.value for row in variables} | dict(owners_of(step))
    return Around(variables, tuple(_objects(held)))


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


def variables_of(function: FunctionType) -> Iterator[StepVariable]:
    """The names that a function has from outside: of the functions around it, and of its file."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if _is_filled(cell):
            yield StepVariable(name, cell, cell.cell_contents)
    names = (name for name in globals_of(function.__code__) if name in function.__globals__)
    yield from (StepVariable(name, function.__globals__, function.__globals__[name]) for name in names)


def globals_of(code: CodeType) -> dict[str, None]:
    """The names of its file that code uses, or the functions in it; attributes are often called alike."""
    names = {row.argval: None for row in get_instructions(code) if row.opname in _GLOBAL}
    for inner in code.co_consts:
        names |= globals_of(inner) if isinstance(inner, CodeType) else {}
    return names


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


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


def _objects(held: Mapping[str, Any]) -> Iterator[ModuleCopy]:
    seen: set[int] = set()
    for name, value in held.items():
        if id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            yield ModuleCopy(ModulePath((name,)), _Nothing(), {}, contents_of("", value))
        elif has_attributes(value):
            yield object_kept(ModulePath((name,)), value)


class _Nothing:
    """Stands for the owner of a container that is a variable itself."""


def _changed(kept: ModuleCopy) -> Iterator[str]:
    now = vars(kept.module)
    names = dict.fromkeys((*kept.attributes, *now))
    yield from (
        str(kept.path.child(name))
        for name in names
        if name not in now or name not in kept.attributes or now[name] is not kept.attributes[name]
    )
    yield from (_spelled(kept, content) for content in kept.changed())


def _spelled(kept: ModuleCopy, content: Content) -> str:
    return str(kept.path.child(content.attribute)) if content.attribute else str(kept.path)

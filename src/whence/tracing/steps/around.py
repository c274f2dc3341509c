"""What a step closes over beside the model: a trainer, a schedule, lists and counters.

A program repeats no change of these. They are given back as they were, and a step that changes one is
refused, for what it did may decide what it does next time.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from whence._torch.attribute_reads import has_attributes
from whence.errors import Place, UnsupportedStep
from whence.provenance import ModulePath
from whence.tracing.modules import CONTAINERS, Content, Kept, contents_of, object_kept, way_back

_NOT_LOOKED_INTO = (Tensor, nn.Module, Optimizer, ModuleType, FunctionType, type)


@dataclass(frozen=True)
class Variable:
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

    variables: tuple[Variable, ...]
    objects: tuple[Kept, ...]

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
        if changed:
            raise UnsupportedStep(
                f"the step changes {', '.join(dict.fromkeys(changed))}",
                where=place,
                why="a program changes tensors, and nothing else, so the next step would find it as it was",
                remedy="do it outside the captured step; where only the first step does it, take one before",
            )


def around(step: Callable[..., Any]) -> Around:
    """Look at what a step closes over."""
    variables = tuple(_variables(step))
    held = {row.name: row.value for row in variables} | dict(_owners(step))
    return Around(variables, tuple(_objects(held)))


def _functions(step: Any) -> Iterator[FunctionType]:
    """The function behind a method, a partial, or a decorator; that of an object that is called."""
    while isinstance(step, functools.partial):
        step = step.func
    step = inspect.unwrap(getattr(step, "__func__", step))
    found = step if isinstance(step, FunctionType) else vars(type(step)).get("__call__")
    if isinstance(found, FunctionType):
        yield found


def _variables(step: Callable[..., Any]) -> Iterator[Variable]:
    for function in _functions(step):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield Variable(name, cell, cell.cell_contents)
        names = (name for name in function.__code__.co_names if name in function.__globals__)
        yield from (Variable(name, function.__globals__, function.__globals__[name]) for name in names)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _owners(step: Any) -> Iterator[tuple[str, Any]]:
    """Whose method it is, what a partial was given, and an object that is called itself."""
    while isinstance(step, functools.partial):
        yield from ((f"args[{at}]", value) for at, value in enumerate(step.args))
        yield from step.keywords.items()
        step = step.func
    owner = getattr(step, "__self__", None if isinstance(step, FunctionType) else step)
    if owner is not None:
        yield type(owner).__name__, owner


def _objects(held: Mapping[str, Any]) -> Iterator[Kept]:
    seen: set[int] = set()
    for name, value in held.items():
        if id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            yield Kept(ModulePath((name,)), _Nothing(), {}, contents_of("", value))
        elif has_attributes(value):
            yield object_kept(ModulePath((name,)), value)


class _Nothing:
    """Stands for the owner of a container that is a variable itself."""


def _changed(kept: Kept) -> Iterator[str]:
    now = vars(kept.module)
    names = dict.fromkeys((*kept.attributes, *now))
    yield from (
        str(kept.path.child(name))
        for name in names
        if name not in now or name not in kept.attributes or now[name] is not kept.attributes[name]
    )
    yield from (_spelled(kept, content) for content in kept.changed())


def _spelled(kept: Kept, content: Content) -> str:
    return str(kept.path.child(content.attribute)) if content.attribute else str(kept.path)

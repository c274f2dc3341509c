"""Give modules back as they were before they ran, and say what of their changes a program will not repeat."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from whence._torch.fakes import FakeTensor
from whence._torch.observe.attribute_reads import TABLES, own_attributes
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence.dependence.snapshots import (
    ATTRIBUTES,
    CONTAINER,
    CONTAINERS,
    Container,
    Saved,
    containers_saved,
    same_items,
    values_of,
    way_back,
)
from whence.errors import LostState, Place
from whence.provenance import ModulePath
from whence.tracing.target.subject import StateTensor, Subject

_HELD = itemgetter(1)
_CONTAINERS = frozenset((*CONTAINERS, OrderedDict))
"""The classes of nearly all containers that modules hold."""


@dataclass
class Lines:
    """The lines of user code that set attributes of modules, as text.

    `made_anew` are attributes that every run makes anew, and entries of containers, which are identified by
    themselves: torch sets them itself, or the program does.
    """

    attributes: dict[tuple[int, str], str] = field(default_factory=dict)
    made_anew: set[tuple[int, Any]] = field(default_factory=set)

    def set_by_torch(self, key: tuple[int, str]) -> None:
        """Torch has set an attribute."""
        self.made_anew.add(key)

    def set_by(self, source: object, key: tuple[int, str]) -> None:
        """A line of the user's, if it is one that is known, has set an attribute."""
        self.made_anew.discard(key)
        if source is not None:
            self.attributes[key] = str(source)


class ModuleCopy(NamedTuple):
    """A module with copies of its attributes and of the containers among them.

    Most of those are empty: `empty` are they, by the names of their attributes.
    """

    path: ModulePath
    module: object
    attributes: dict[str, Any]
    contents: Sequence[Saved]
    empty: Sequence[tuple[str, Container]] = ()

    @property
    def is_unchanged(self) -> bool:
        """Whether it holds the same, also in containers."""
        return (
            same_items(own_attributes(self.module), self.attributes)
            and not any(map(_HELD, self.empty))
            and all(content.is_unchanged for content in self.contents)
        )

    def changed(self) -> Iterator[Saved]:
        """The containers that hold something else now."""
        if any(map(_HELD, self.empty)):
            yield from (Saved(name, held, CONTAINER, ()) for name, held in self.empty if held)
        yield from (content for content in self.contents if not content.is_unchanged)

    def restore(self) -> None:
        """Give it back what it held."""
        for content in self.changed():
            content.restore()
        Saved("", self.module, ATTRIBUTES, self.attributes).restore()


@dataclass(frozen=True)
class Loss:
    """Something that a module kept from the run and that a program will not make again."""

    module: ModuleCopy
    name: str
    value: Any
    line: str | None

    def __str__(self) -> str:
        spelled = str(self.module.path.child(self.name))
        return f"{spelled} ({self.line})" if self.line else spelled


@contextmanager
def modules_restored(modules: Iterable[tuple[ModulePath, nn.Module]]) -> Iterator[None]:
    """Undo whatever the block writes to modules: attributes, buffers, hooks, submodules."""
    restore = way_back(kept_of(modules))
    try:
        yield
    finally:
        restore()


@contextmanager
def changes_reported(
    before: Sequence[ModuleCopy],
    lines: Lines,
    line_of: Callable[[Tensor], str | None],
    *,
    of_objects: bool = False,
) -> Iterator[None]:
    """Undo what a capture writes to modules; after success, say which of it will not happen again, with the
    `line_of` what made it.

    Tensors that were kept are warned about. Parameters, and modules that hold some, are new state: a
    `LostState` error, but for what objects keep. `before` may grow until the block ends.
    """
    changed, losses = before, list[Loss]()
    try:
        yield
        changed = [kept for kept in before if not kept.is_unchanged]
        losses += [loss for kept in changed for loss in _losses(kept, lines, line_of)]
    finally:
        way_back(changed)()
    state = [loss for loss in losses if not of_objects and isinstance(loss.value, nn.Module | nn.Parameter)]
    _refuse_new_state(state)
    _warn_about([loss for loss in losses if not any(loss is each for each in state)])


def kept_of(modules: Iterable[tuple[ModulePath, nn.Module]]) -> list[ModuleCopy]:
    """Every module once, under its first path, with copies of what it holds."""
    unique: dict[int, tuple[ModulePath, nn.Module]] = {}
    for path, module in modules:
        unique.setdefault(id(module), (path, module))
    return [object_kept(path, module) for path, module in unique.values()]


def object_kept(path: ModulePath, thing: object) -> ModuleCopy:
    """An object that a module holds, with copies of what it holds itself."""
    attributes = dict(vars(thing))
    held = [
        item
        for item in attributes.items()
        if (kind := type(item[1])) in _CONTAINERS or (kind not in PLAIN and issubclass(kind, CONTAINERS))
    ]
    full, empty = [item for item in held if item[1]], [item for item in held if not item[1]]
    return ModuleCopy(path, thing, attributes, containers_saved(full), empty)


def _losses(kept: ModuleCopy, lines: Lines, line_of: Callable[[Tensor], str | None]) -> Iterator[Loss]:
    for name, value in vars(kept.module).items():
        if (id(kept.module), name) in lines.made_anew:
            continue
        if value is not kept.attributes.get(name) and contains_fakes(value):
            yield _loss_of_attribute(kept, name, value, lines, line_of)
    for content in kept.changed():
        known = {id(value) for value in values_of(content.before)}
        for key, value in _items_with_keys(content.thing):
            is_buffer = content.path == "_buffers" and key in content.before
            reassigned = is_buffer and content.before[key] is not None
            is_lost = id(value) not in known and (id(content.thing), key) not in lines.made_anew
            if is_lost and contains_fakes(value) and not reassigned:
                registered = content.path in TABLES
                yield _loss_of_attribute(
                    kept, str(key) if registered else content.path, value, lines, line_of
                )


def _loss_of_attribute(
    kept: ModuleCopy, name: str, value: Any, lines: Lines, line_of: Callable[[Tensor], str | None]
) -> Loss:
    line = lines.attributes.get((id(kept.module), name))
    made = next(fakes_in(value), None)
    return Loss(kept, name, value, line or (None if made is None else line_of(made)))


def fakes_in(value: object) -> Iterator[Tensor]:
    """The fake tensors in a value: itself, those of a module, those in containers."""
    if isinstance(value, nn.Module):
        held: Sequence[Any] = (*value.parameters(), *value.buffers())
    else:
        held, _ = tree_flatten(list(value) if isinstance(value, set) else value)
    yield from (tensor for tensor in held if isinstance(tensor, FakeTensor))


def contains_fakes(value: object) -> bool:
    """Whether a value is, or holds, a tensor of a capture."""
    return next(fakes_in(value), None) is not None


def _refuse_new_state(losses: Sequence[Loss]) -> None:
    if not losses:
        return
    kinds = ["Parameter" if isinstance(x.value, FakeTensor) else type(x.value).__name__ for x in losses]
    made = [f"{kind} {loss}" for kind, loss in zip(kinds, losses, strict=True)]
    raise LostState(
        f"the model makes {', '.join(made)} while it runs, and keeps it",
        where=Place(str(losses[0].module.path), losses[0].line),
        why="a module or parameter that is made in forward is new state: eager would train it, and a program "
        "would make another one in every run",
        remedy="make it in __init__, or call the model once on the example inputs before the capture",
    )


def _warn_about(losses: Sequence[Loss]) -> None:
    by_module: dict[int, list[Loss]] = {}
    for loss in losses:
        by_module.setdefault(id(loss.module.module), []).append(loss)
    for found in by_module.values():
        kept = found[0].module
        names = ", ".join(dict.fromkeys(map(str, found)))
        warnings.warn(
            f"{type(kept.module).__name__} kept tensors of the capture in {names}; they are removed. "
            "A captured program does not repeat that: run the model once before the capture, so that it has "
            "them, register them as buffers, or return them",
            stacklevel=2,
        )


def _items_with_keys(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items() if isinstance(held, dict) else enumerate(held))


def reassigned_buffers(
    subject: Subject, state: Sequence[tuple[StateTensor, fx.Node]]
) -> list[tuple[Tensor, Tensor]]:
    """Buffers that the run replaced by another tensor: each with its successor, once."""
    now = {
        path.child(name): held
        for path, module in subject.named_modules()
        for name, held in own_attributes(module)["_buffers"].items()
    }
    pairs = [(row.tensor, now.get(row.paths[0])) for row, _ in state if not row.is_parameter]
    return [(before, after) for before, after in pairs if after is not None and after is not before]

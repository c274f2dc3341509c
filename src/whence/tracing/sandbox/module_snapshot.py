"""Give modules back as they were before they ran, and say what of their changes a program will not repeat."""

import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, fx, nn

from whence._torch.observe.attribute_reads import TABLES, own_attributes
from whence._torch.pytrees import tree_flatten
from whence._torch.record.recorder import FakeTensor
from whence.errors import LostState, Place
from whence.provenance import ModulePath
from whence.tracing.target.subject import StateTensor, Subject

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, list, set, deque)
_PLAIN_CONTAINERS = (*CONTAINERS, OrderedDict)


@dataclass
class Lines:
    """The lines of user code that set attributes of modules, and that made tensors, as text.

    `by_torch` are attributes that torch set itself: it makes them anew in every run.
    """

    attributes: dict[tuple[int, str], str] = field(default_factory=dict)
    by_torch: set[tuple[int, str]] = field(default_factory=set)
    maker: Callable[[Tensor], str | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Content:
    """A container under an attribute, itself or inside another, with a copy of it; None for an empty one."""

    attribute: str
    held: Container
    before: Container | None

    @property
    def is_unchanged(self) -> bool:
        """Whether it holds the same, in the same order."""
        return not self.held if self.before is None else same_items(self.held, self.before)


@dataclass(frozen=True)
class ModuleCopy:
    """A module with copies of its attributes and of the containers among them.

    Most of those are empty: `empty` are they, by the names of their attributes.
    """

    path: ModulePath
    module: object
    attributes: dict[str, Any]
    contents: Sequence["Content"]
    empty: Sequence[tuple[str, Container]] = ()

    @property
    def is_unchanged(self) -> bool:
        """Whether it holds the same, also in containers."""
        return same_items(own_attributes(self.module), self.attributes) and not any(self.changed())

    def changed(self) -> Iterator["Content"]:
        """The containers that hold something else now."""
        if any(held for _, held in self.empty):
            yield from (Content(name, held, None) for name, held in self.empty if held)
        yield from (content for content in self.contents if not content.is_unchanged)


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


def way_back(before: Iterable[ModuleCopy]) -> Callable[[], None]:
    """A way back to what was kept; looked through only when it is gone, so it may grow until then."""

    def restore() -> None:
        for kept in before:
            _restore(kept)

    return restore


@contextmanager
def changes_reported(before: Sequence[ModuleCopy], lines: Lines) -> Iterator[None]:
    """Undo what a capture writes to modules; after success, say which of it will not happen again.

    Tensors that were kept are warned about. Parameters, and modules that hold some, are new state: a
    `LostState` error.
    """
    with _undone(before, lines) as losses:
        yield
    _refuse_new_state([loss for loss in losses if _is_state(loss.value)])
    _warn_about([loss for loss in losses if not _is_state(loss.value)])


@contextmanager
def objects_reported(before: Sequence[ModuleCopy], lines: Lines) -> Iterator[None]:
    """Undo what the block writes to the objects in `before`, which may grow; warn about tensors they kept."""
    with _undone(before, lines) as losses:
        yield
    _warn_about(losses)


@contextmanager
def _undone(before: Sequence[ModuleCopy], lines: Lines) -> Iterator[list[Loss]]:
    """Undo what the block writes; the list has, after success, what of it is lost."""
    changed, losses = before, list[Loss]()
    try:
        yield losses
        changed = [kept for kept in before if not kept.is_unchanged]
        losses += [loss for kept in changed for loss in _losses(kept, lines)]
    finally:
        way_back(changed)()


def kept_of(modules: Iterable[tuple[ModulePath, nn.Module]]) -> list[ModuleCopy]:
    """Every module once, under its first path, with copies of what it holds."""
    unique: dict[int, tuple[ModulePath, nn.Module]] = {}
    for path, module in modules:
        unique.setdefault(id(module), (path, module))
    return [object_kept(path, module) for path, module in unique.values()]


def object_kept(path: ModulePath, thing: object) -> ModuleCopy:
    """An object that a module holds, with copies of what it holds itself."""
    attributes = dict(vars(thing))
    held = [(name, value) for name, value in attributes.items() if isinstance(value, CONTAINERS)]
    empty = [row for row in held if not row[1]]
    return ModuleCopy(path, thing, attributes, _containers([row for row in held if row[1]]), empty)


def contents_of(name: str, held: Container) -> list[Content]:
    """A container under a name and those inside it, each with a copy."""
    return _containers([(name, held)])


def _containers(waiting: list[tuple[str, Container]]) -> list[Content]:
    found: list[Content] = []
    seen: set[int] = set()
    while waiting:
        name, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        found.append(Content(name, held, _copied(held) if held else None))
        if held:
            waiting += [(name, value) for value in _values(held) if isinstance(value, CONTAINERS)]
    return found


def _copied(held: Container) -> Container:
    """A copy; a class of the user's may have its own idea of one."""
    return held.copy() if type(held) in _PLAIN_CONTAINERS else copy(held)


def _losses(kept: ModuleCopy, lines: Lines) -> Iterator[Loss]:
    for name, value in vars(kept.module).items():
        if (id(kept.module), name) in lines.by_torch:
            continue
        if value is not kept.attributes.get(name) and held_in_capture(value):
            yield _loss(kept, name, value, lines)
    for content in kept.changed():
        before: Container = {} if content.before is None else content.before
        known = {id(value) for value in _values(before)}
        for key, value in _items(content.held):
            reassigned = content.attribute == "_buffers" and key in before
            if id(value) not in known and held_in_capture(value) and not reassigned:
                registered = content.attribute in TABLES
                yield _loss(kept, str(key) if registered else content.attribute, value, lines)


def _loss(kept: ModuleCopy, name: str, value: Any, lines: Lines) -> Loss:
    line = lines.attributes.get((id(kept.module), name))
    made = next(fakes_in(value), None)
    return Loss(kept, name, value, line or (None if made is None else lines.maker(made)))


def fakes_in(value: object) -> Iterator[Tensor]:
    """The fake tensors in a value: itself, those of a module, those in containers."""
    if isinstance(value, nn.Module):
        held: Sequence[Any] = (*value.parameters(), *value.buffers())
    else:
        held, _ = tree_flatten(list(value) if isinstance(value, set) else value)
    yield from (tensor for tensor in held if _is_fake(tensor))


def held_in_capture(value: object) -> bool:
    """Whether a value is, or holds, a tensor of a capture."""
    return next(fakes_in(value), None) is not None


def _is_state(value: object) -> bool:
    return isinstance(value, nn.Module | nn.Parameter)


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _refuse_new_state(losses: Sequence[Loss]) -> None:
    if not losses:
        return
    made = [f"{'Parameter' if _is_fake(x.value) else type(x.value).__name__} {x}" for x in losses]
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
            "A captured program does not repeat that: register them as buffers, or return them",
            stacklevel=2,
        )


def _restore(kept: ModuleCopy) -> None:
    for content in kept.changed():
        refill(content.held, content.before)
    now = own_attributes(kept.module)
    if not same_items(now, kept.attributes):
        reset(now, kept.attributes)


def reset(now: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Give a dictionary its items back, in order.

    Another thread may be looking: what was there and still is, is there all the time.
    """
    for name in [name for name in now if name not in before]:
        now.pop(name, None)
    for name, value in before.items():  # `update` of a Counter would add
        now[name] = value
    if list(now) != list(before):
        for name, value in before.items():
            now.pop(name, None)
            now[name] = value


def _items(held: Container) -> list[tuple[Any, Any]]:
    return list(held.items()) if isinstance(held, dict) else [("", value) for value in held]


def _values(held: Container) -> list[Any]:
    return [value for _, value in _items(held)]


def same_items(left: Any, right: Any) -> bool:
    """Whether two containers hold the same objects, in the same order where there is one."""
    if isinstance(left, set | bytearray | array) or isinstance(right, set):
        return bool(left == right)
    if len(left) != len(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(map(is_, left.values(), right.values()))
    return all(map(is_, left, right))


def refill(held: Any, kept: Any) -> None:
    """Give a container back what it held; None for nothing."""
    if kept is None:
        held.clear()
    elif isinstance(held, dict) and isinstance(kept, dict):
        reset(held, kept)
    elif isinstance(held, list | bytearray | array):
        held[:] = kept
    elif isinstance(held, deque):
        held.clear()
        held.extend(kept)
    else:
        held.clear()
        held.update(kept)


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

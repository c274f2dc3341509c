"""Give modules back as they were before they ran."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor, fx, nn

from whence._torch.recording import FakeTensor
from whence.tracing.subject import StateTensor, Subject

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def modules_restored(subject: Subject) -> Iterator[None]:
    """Undo whatever running the model writes to its modules: attributes, buffers, hooks, submodules."""
    modules = list({id(module): module for _, module in subject.named_modules()}.values())
    before = [(module, dict(vars(module)), _contents(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            _restore(module, attributes, contents)


def _contents(module: nn.Module) -> list[tuple[Container, Container]]:
    """The containers among a module's attributes, also inside each other, each with a copy."""
    found: list[tuple[Container, Container]] = []
    waiting = [value for value in vars(module).values() if isinstance(value, _CONTAINERS)]
    seen: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        found.append((held, copy(held)))
        inner = held.values() if isinstance(held, dict) else held
        waiting += [value for value in inner if isinstance(value, _CONTAINERS)]
    return found


def _restore(
    module: nn.Module, attributes: Mapping[str, Any], contents: Sequence[tuple[Container, Container]]
) -> None:
    now = vars(module)
    lost = [name for name, value in now.items() if value is not attributes.get(name) and _is_fake(value)]
    for held, kept in contents:
        if held is not attributes.get("_buffers") and _gained_fakes(held, kept):
            lost.append(f"an item of {_name_of(held, attributes)}")
        if not _same_items(held, kept):
            _refill(held, kept)
    if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
        now.clear()
        now.update(attributes)
    if lost:
        warnings.warn(
            f"{type(module).__name__} kept tensors of the capture in {', '.join(lost)}; they are removed. "
            "A captured program does not repeat that: register them as buffers, or return them",
            stacklevel=2,
        )


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _gained_fakes(held: Container, kept: Container) -> bool:
    if len(held) == len(kept) and _same_items(held, kept):
        return False
    before = {id(value) for value in _values(kept)}
    return any(_is_fake(value) and id(value) not in before for value in _values(held))


def _name_of(held: Container, attributes: Mapping[str, Any]) -> str:
    return next((name for name, value in attributes.items() if value is held), "a container")


def _values(held: Container) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else list(held)


def _same_items(left: Container, right: Container) -> bool:
    if isinstance(left, set) or isinstance(right, set):
        return left == right
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(left[key] is right[key] for key in left)
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _refill(held: Container, kept: Container) -> None:
    held.clear()
    if isinstance(held, dict | set):
        held.update(kept)
    else:
        held.extend(kept)


def reassigned_buffers(
    subject: Subject, state: Sequence[tuple[StateTensor, fx.Node]]
) -> list[tuple[Tensor, Tensor]]:
    """Buffers that the run replaced by another tensor: each with its successor, once."""
    now = {
        path.child(name): held
        for path, module in subject.named_modules()
        for name, held in module._buffers.items()
    }
    pairs = [(row.tensor, now.get(row.paths[0])) for row, _ in state if not row.is_parameter]
    return [(before, after) for before, after in pairs if after is not None and after is not before]

"""Give modules back as they were before they ran."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from whence._torch.recording import FakeTensor
from whence.tracing.subject import StateTensor, Subject


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


def _contents(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Copies of the dicts that a module keeps its parts in."""
    return {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}


def _restore(
    module: nn.Module, attributes: Mapping[str, Any], contents: Mapping[str, dict[Any, Any]]
) -> None:
    now = vars(module)
    lost = [
        name
        for name, value in now.items()
        if value is not attributes.get(name) and isinstance(value, FakeTensor)
    ]
    if lost:
        warnings.warn(
            f"{type(module).__name__} assigned tensors to attributes during the capture: {', '.join(lost)}. "
            "A captured program does not repeat that; register them as buffers to keep them",
            stacklevel=2,
        )
    for name, kept in contents.items():
        held = attributes[name]
        if not _same_items(held, kept):
            held.clear()
            held.update(kept)
    if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
        now.clear()
        now.update(attributes)


def _same_items(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return list(left) == list(right) and all(left[key] is right[key] for key in left)


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

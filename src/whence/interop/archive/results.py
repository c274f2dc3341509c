"""What operators give on the fake values of a file, beside what it says that they give."""

from collections.abc import Iterable, Iterator
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.fakes import FakeTensor, FakeTensorMode, told_alone
from whence._torch.operators.schemas import gives_tensors, op_name
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import has_open_sizes, is_symbolic
from whence.dependence.asking import Failed, attempt
from whence.program.signature import describe

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
"""What an operator raises for arguments that do not fit; that nobody can tell is said by classes of these."""


def layout_of(value: Any) -> Any:
    """Equal for values of which operators give alike; of open sizes, the value itself."""
    if isinstance(value, tuple | list):
        return tuple(map(layout_of, value))
    if not isinstance(value, Tensor) or not _is_plain(value):
        return id(value)
    return value.shape, value.stride(), value.dtype, value.device


def otherwise(mode: FakeTensorMode, nodes: Iterable[fx.Node]) -> Iterator[str]:
    """What is wrong with nodes of which PyTorch's own operators give something else, or nothing.

    Nobody can tell of open sizes, of devices that need not be here, and of as many results as a size says.
    """
    for node in nodes:
        given = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        said = tree_flatten(node.meta.get("val"))[0]
        known = gives_tensors(node.target) or node.target is getitem
        if not known or not all(map(_is_plain, (*tree_flatten(given)[0], *said))):
            continue
        found = attempt(partial(_computed, mode, node.target, *given))
        if isinstance(found, Failed):
            wrong = [str(found.error)] if type(found.error) in _REFUSALS else []
        else:
            pairs = zip(tree_flatten(found)[0], said, strict=False)
            wrong = [f"it gives {now}" for now, then in _in_words(pairs) if then != now]
        yield from (f"{node.name}, {op_name(node.target)}: {why}" for why in wrong)


def _computed(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    with told_alone(mode), torch.no_grad():
        return target(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    """Whether all is known of it: a tensor of fixed sizes that is not elsewhere, or no number for a size."""
    if not isinstance(value, Tensor):
        return not is_symbolic(value)
    is_here = type(value) is FakeTensor and value.device.type in ("cpu", "meta")
    return is_here and value.layout is torch.strided and not has_open_sizes(value)


def _in_words(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str | None, ...]]:
    return (tuple(describe(each) if isinstance(each, Tensor) else None for each in pair) for pair in pairs)

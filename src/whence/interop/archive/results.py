"""What operators give on the fake values of a file, beside what it says that they give."""

from collections.abc import Iterable, Iterator
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.fakes import FakeTensor, FakeTensorMode, fake_at, told_alone
from whence._torch.operators.schemas import gives_tensors, op_name
from whence._torch.pytrees import tree_flatten, tree_unflatten
from whence._torch.sizes.symbols import has_open_sizes, size_at
from whence.dependence.asking import Failed, attempt
from whence.program.signature import describe

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
"""What an operator raises for arguments that do not fit; that nobody can tell is said by classes of these."""


def layout_of(value: Any) -> Any:
    """Equal for values of which operators give alike, where open sizes are those of the example."""
    if isinstance(value, tuple | list):
        return tuple(map(layout_of, value))
    found = _laid_out(value) if isinstance(value, Tensor) else None
    return id(value) if found is None else (found, value.dtype, value.device)


def _laid_out(value: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Sizes and strides in the example; None where they are not known, or the tensor is elsewhere."""
    is_here = type(value) is FakeTensor and value.device.type in ("cpu", "meta")
    if not is_here or value.layout is not torch.strided:
        return None
    rows = attempt(lambda: tuple(tuple(size_at(n, {}) for n in row) for row in (value.shape, value.stride())))
    return None if isinstance(rows, Failed) else rows  # type: ignore[return-value]


def sizes_in_example(value: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor in the example; None where they are not known."""
    found = _laid_out(value) if isinstance(value, Tensor) else None
    return None if found is None else found[0]


def _is_known(value: Any) -> bool:
    return not isinstance(value, Tensor) or _laid_out(value) is not None


def otherwise(mode: FakeTensorMode, nodes: Iterable[fx.Node], *, of_this_release: bool) -> Iterator[str]:
    """What is wrong with nodes of which PyTorch's own operators give something else, or nothing.

    Open sizes are those of the example. Nobody can tell of those that data decide, of devices that are not
    here, and of as many results as a value says; nor whether another release lays results out alike.
    """
    for node in nodes:
        given = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        known = gives_tensors(node.target) or node.target is getitem
        example = attempt(partial(_in_example, mode, (given, node.meta.get("val")))) if known else None
        if example is None or isinstance(example, Failed):
            continue
        given, said = example[0], tree_flatten(example[1])[0]
        found = attempt(partial(_computed, mode, node.target, *given))
        if isinstance(found, Failed):
            wrong = [str(found.error)] if type(found.error) in _REFUSALS else []
        elif not of_this_release:
            continue
        else:
            made = tree_flatten(found)[0]
            pairs = zip(made, said, strict=False) if all(map(_is_known, made)) else ()
            wrong = [f"it gives {now}" for now, then in _in_words(pairs) if then != now]
        yield from (f"{node.name}, {op_name(node.target)}: {why}" for why in wrong)


def _computed(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    with told_alone(mode), torch.no_grad():
        return target(*args, **kwargs)


def _in_example(mode: FakeTensorMode, values: Any) -> Any:
    """Values in which open sizes are numbers; raises `LookupError` where one is not known, or elsewhere."""
    leaves, spec = tree_flatten(values)
    return tree_unflatten([_leaf_in_example(mode, leaf) for leaf in leaves], spec)


def _leaf_in_example(mode: FakeTensorMode, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return size_at(leaf, {})
    if (known := _laid_out(leaf)) is None:
        raise LookupError
    return fake_at(mode, leaf.device, leaf.dtype, *known) if has_open_sizes(leaf) else leaf


def _in_words(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str | None, ...]]:
    return (tuple(describe(each) if isinstance(each, Tensor) else None for each in pair) for pair in pairs)

"""What operators give on symbols, remembered.

Sizes that are symbols make fake kernels slow: each result computes its number of elements, its strides and
whether it is contiguous with sympy. Equal layers ask the same again and again, so what an operator gave on
tensors of some sizes is given once more, as a fresh tensor with the same facts. PyTorch's own cache of fake
results computes those facts anew each time.

A result that is a view then has memory of its own. Nothing here looks at the memory of fake tensors: writes
and views are followed by what operators say of themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import snapshot_fake

from whence._torch.operators.schemas import owner_of, written_arguments
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import SYMBOLIC, expression
from whence._torch.tensors import LAYOUT, WRITES, count_writes


@cache
def _asks_for_numbers(func: Any) -> bool:
    return not _NUMBERS.isdisjoint(func.tags)


_NUMBERS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def _owners(values: Any, node_of: Callable[[Tensor], fx.Node | None]) -> Iterator[fx.Node]:
    """In whose memory tensors lie, those in lists among them."""
    tensors = (value for value in tree_flatten(values)[0] if isinstance(value, Tensor))
    return (owner_of(node) for tensor in tensors if (node := node_of(tensor)) is not None)


class _Unknown(Exception):
    """An argument whose part in the result is not known."""


class Results:
    """Results by operator and what its arguments are like."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._layouts: dict[Any, int] = {}
        self._written: Counter[fx.Node] = Counter()

    def of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """What `func` gives, and what is to be written down as its value."""
        key = None if func._schema.is_mutable else self._key(func, args, kwargs)
        known = None if key is None else self._results.get(key)
        if known is not None:
            return self._fresh(known), known
        given = run()
        template = _each(given, snapshot_fake)
        if key is not None and not any(given is argument for argument in args):
            self._results[key] = template
            for one, kept in zip(_all(given), _all(template), strict=True):
                if isinstance(kept, Tensor):
                    number = self._layout(kept)
                    setattr(one, LAYOUT, number)
        return given, template

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_of: Callable[[Tensor], fx.Node | None],
    ) -> None:
        """An operator is called: one that writes may change what its arguments are like, and their numbers.

        A fake tensor knows the symbols of its numbers until autograd has counted a write to it. Of a write
        through `.data` that hears nothing, nor does what stands for a tensor of the model's.
        """
        if func._schema.is_mutable:
            for value in args:
                if type(value) is FakeTensor:
                    value.__dict__.pop(LAYOUT, None)
            self._written.update(_owners(written_arguments(func, args, kwargs), node_of))
        elif _asks_for_numbers(func):
            times = sum(self._written[owner] for owner in _owners(args, node_of))
            behind = [value for value in args if isinstance(value, FakeTensor) and times]
            count_writes(value for value in behind if vars(value).get(WRITES) != times)
            for value in behind:
                setattr(value, WRITES, times)

    def _fresh(self, template: Any) -> Any:
        def made(kept: Any) -> Any:
            fresh: Any = snapshot_fake(kept)
            setattr(fresh, LAYOUT, self._layout(kept))
            return fresh

        return _each(template, made)

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            found = (func, self._like(args), tuple((name, self._like(kwargs[name])) for name in kwargs))
        except _Unknown:
            return None
        return found if any(type(value) in (FakeTensor, list) for value in args) else None

    def _like(self, value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            return self._layout(value)
        if kind in PLAIN:
            return kind, value
        if kind in SYMBOLIC:
            return kind, expression(value)
        if kind is list or kind is tuple:
            return kind, tuple(self._like(item) for item in value)
        raise _Unknown

    def _layout(self, tensor: Any) -> int:
        """A number for everything about a tensor that an operator's result follows from."""
        known = getattr(tensor, LAYOUT, None)
        if known is not None:
            return known  # type: ignore[no-any-return]
        found = _layout_of(tensor)
        number = self._layouts.setdefault(found, len(self._layouts))
        setattr(tensor, LAYOUT, number)
        return number


def _layout_of(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            raise _Unknown
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        flags = (tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
        return tensor.dtype, tensor.device, tensor.dim(), flags, tuple(map(_size_key, sizes))


def _size_key(size: Any) -> Any:
    return expression(size) if isinstance(size, SYMBOLIC) else size


def _all(result: Any) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for part in result:
            yield from _all(part)
    else:
        yield result


def _each(result: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(result, list | tuple):
        return type(result)([_each(part, change) for part in result])
    return change(result) if isinstance(result, Tensor) else result

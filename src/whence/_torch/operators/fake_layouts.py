"""Memory layouts that fake kernels get wrong.

A fake tensor with other strides than the real kernel gives leads the model down another path: `reshape` is a
view in the capture and a copy in eager, or the other way round. Each rule says what the CPU kernel does.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from whence._torch.sizes.symbols import has_open_sizes
from whence._torch.tensors import storage_of

LayoutRule = Callable[[tuple[Any, ...], Any], Any]
"""From the arguments of a call and the result of its fake kernel to what the real one gives."""


def follows(argument: int) -> LayoutRule:
    """A result, the first of several, is laid out as an argument is: contiguous, or channels last, never a
    permutation."""

    def laid_out(args: tuple[Any, ...], result: Any) -> Any:
        first, *others = result if isinstance(result, tuple) else (result,)
        if not isinstance(first, Tensor):
            return result
        expected = torch.empty_like(first, memory_format=suggest_memory_format(args[argument]))
        if expected.stride() == first.stride():
            return result
        return (expected, *others) if isinstance(result, tuple) else expected

    return laid_out


def as_on_meta(func: Any) -> LayoutRule:
    """C++ lays out a dimension of size 1 as it comes, and that decides what is channels last."""

    def laid_out(args: tuple[Any, ...], result: Tensor) -> Tensor:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if any(map(has_open_sizes, (result, *given))) or 1 not in result.shape or all(map(_is_dense, given)):
            return result
        real = _of_kernel(func, _on_meta, args, {})
        if real.stride() != result.stride() and storage_of(result) == storage_of(args[0]):
            return args[0].as_strided(result.shape, real.stride(), result.storage_offset())  # type: ignore[no-any-return]
        return _with_strides_of(real, result)  # type: ignore[no-any-return]

    return laid_out


def as_pointwise(args: tuple[Any, ...], result: Tensor) -> Tensor:
    """Laid out as a sum of the tensors is: decompositions of derivatives look at others first."""
    given = _tensors(args)
    pair = (given[0], given[-1])  # one, where the other is a number
    if any(map(has_open_sizes, given)):
        return _laid_out_as(torch.add(*pair), result)
    return _with_strides_of(_of_kernel(torch.add, _on_meta, pair, {}), result)  # type: ignore[no-any-return]


def contiguous(_args: tuple[Any, ...], result: Any) -> Any:
    """New memory in the order of dimensions, whatever the arguments' is; of several results all."""
    if isinstance(result, list | tuple):
        return type(result)(contiguous((), part) for part in result)
    if not isinstance(result, Tensor):
        return result
    if has_open_sizes(result):
        return torch.empty_like(result, memory_format=torch.contiguous_format)
    return _with_strides_of(torch.empty(result.shape, device="meta"), result)


def contiguous_on_cpu(args: tuple[Any, ...], result: Any) -> Any:
    """As `contiguous`, by kernels of the CPU alone."""
    is_there = all(tensor.device.type == "cpu" for tensor in _tensors(args))
    return contiguous(args, result) if is_there else result


def contiguous_in_training(flag: int) -> LayoutRule:
    """As `contiguous_on_cpu`, where the argument says that it trains."""

    def laid_out(args: tuple[Any, ...], result: Any) -> Any:
        return contiguous_on_cpu(args, result) if args[flag : flag + 1] == (True,) else result

    return laid_out


def like_new(argument: int) -> LayoutRule:
    """New memory as that of an argument, also where it is permuted."""

    def laid_out(args: tuple[Any, ...], result: Tensor) -> Any:
        real = torch.empty_like(args[argument])
        return _laid_out_as(real, result) if has_open_sizes(result) else _with_strides_of(real, result)

    return laid_out


def as_the_kernel_lays_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Results where an argument or one of them could be contiguous and channels last at once.

    Fake kernels go by rules of their own there, so the kernel itself runs, on ones.
    """
    given = _tensors((*args, *kwargs.values()))
    found = _tensors((result,))
    if not any(map(_could_be_either, (*given, *found))) or not _gives_its_own(func):
        return result
    is_addressing = any(not (tensor.is_floating_point() or tensor.dtype is torch.bool) for tensor in given)
    if is_addressing or any(map(has_open_sizes, given)) or not all(map(_is_small, (*given, *found))):
        return result  # a kernel may trust whole numbers to be addresses
    try:
        real = _of_kernel(func, _ones, args, kwargs)
    except _REFUSED:
        return result
    return _with_strides_of(real, result)


def _of_kernel(func: Any, stand_in: Callable[[Any], Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a kernel itself gives, run on what stands in for its arguments."""
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        return func(*map(stand_in, args), **{name: stand_in(value) for name, value in kwargs.items()})


_BY_DATA = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
_LARGE = 1 << 20
"""Elements from which on a kernel would take its time."""

_REFUSED = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
"""What a kernel raises that cannot be run on ones."""


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [
        part
        for value in values
        for part in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(part, Tensor)
    ]


def _could_be_either(tensor: Tensor) -> bool:
    """Whether the sizes of a picture leave open how it lies: one channel, or one pixel."""
    sizes = tensor.shape
    if len(sizes) not in (4, 5) or any(type(size) is not int for size in sizes):
        return False  # of open sizes nothing is to be found out
    return sizes[1] == 1 or all(size == 1 for size in sizes[2:])


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() <= _LARGE


@cache
def _gives_its_own(func: Any) -> bool:
    """Whether an operator of PyTorch's draws nothing, and gives new tensors whose sizes no data decide."""
    if func.namespace != "aten" or func._schema.is_mutable or not _BY_DATA.isdisjoint(func.tags):
        return False
    return all(each.alias_info is None for each in func._schema.returns)


def _ones(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return type(given)(map(_ones, given))
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu").fill_(1)


def _with_strides_of(real: Any, result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_with_strides_of, real, result))
    if not isinstance(result, Tensor) or real.shape != result.shape or real.stride() == result.stride():
        return result
    return torch.empty_strided(real.shape, real.stride(), dtype=result.dtype, device=result.device)


def _laid_out_as(real: Tensor, result: Tensor) -> Tensor:
    """Where sizes are open: strides are not compared, which would be a guard on sizes."""
    return torch.empty_like(real, dtype=result.dtype) if len(real.shape) == len(result.shape) else result


def is_laid_out_two_ways(tensor: Any) -> bool:
    """Whether a tensor is contiguous and channels last at once, as one of a single pixel can be.

    Which of the two a kernel's new tensor is then, fake kernels do not know, and convolutions go by it.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or has_open_sizes(tensor):
        return False
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return False
    return suggest_memory_format(tensor) is not torch.contiguous_format


def _on_meta(given: Any) -> Any:
    """An argument without numbers; a number among tensors is a tensor to the kernel, without dimensions."""
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    return torch.empty((), device="meta") if isinstance(given, int | float | complex) else given


def _is_dense(given: Tensor) -> bool:
    """Whether the strides are those of a new tensor, also where the size is 1."""
    expected = 1
    for size, stride in zip(reversed(given.shape), reversed(given.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True

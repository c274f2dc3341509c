"""Facts about tensors that have no public spelling."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

LAYOUT = "_whence_layout"
"""Where a fake tensor keeps what `Results` knows of it."""
CLASS_ASKED = "_whence_class_asked"
"""Where it keeps that code has asked for its class."""
MISSED = "_whence_missed"
"""Where it keeps the names of attributes that code has looked for, and it has not."""
WRITES = "_whence_writes"
"""Where it keeps how often its memory had been written to when code asked for its numbers."""
LEFT_OUT = "_whence_left_out"
"""Where it keeps the attributes that somebody has set on the tensor whose twin it is."""
PLAIN_ATTRIBUTES = (bool, int, float, str, type(None))
_OF_FAKE = frozenset(
    {
        *("_fake_device", "fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor"),
        *(LAYOUT, CLASS_ASKED, MISSED, WRITES, LEFT_OUT),
    }
)
_REMEMBERED = ("_memo", "_memo_vc", "_memo_epoch")
"""Attributes of a fake tensor, and how those end in which it remembers results."""


PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


_BITS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The integers of as many bytes."""


def has_no_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has a shape alone: it is on the meta device, or fake."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """`torch.equal`, with NaN equal to NaN, and a zero not to one of the other sign."""
    if (left.layout, left.dtype, left.shape) != (right.layout, right.dtype, right.shape):
        return False
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.dtype is torch.complex32:  # PyTorch compares none
        left, right = left.to(torch.complex64), right.to(torch.complex64)
    if not left.is_floating_point() and not left.is_complex():
        return torch.equal(left, right)
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    pair = [each.detach().resolve_neg().contiguous() for each in (left, right)]
    first, second = (each.view(_BITS[each.itemsize]) for each in pair)
    if torch.equal(first, second):
        return True
    both_nan = pair[0].double().isnan() & pair[1].double().isnan()
    return bool(((first == second) | both_nan).all())


def negated(tensor: Tensor) -> Tensor:
    """What stands for the negative of a tensor, over its memory."""
    view: Tensor = torch.ops.aten._neg_view.default(tensor)
    return view


def is_simple(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf with memory of its own, all of which it shows, and nothing else about it."""
    with torch._C.DisableTorchFunction():
        return (
            type(tensor) in PLAIN_TENSORS
            and tensor.is_leaf
            and tensor.layout is torch.strided
            and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
            and not is_lazy(tensor)
            and tensor._base is None
            and not tensor.is_quantized
            and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        )


def generator_state() -> bytes:
    """The state of the CPU generator, read past any mode that is active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return bytes(torch.get_rng_state().tolist())


def set_generator_state(state: bytes) -> None:
    """Give the CPU generator a state that `generator_state` has read."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))


@contextmanager
def untouched(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors back as they were: version counter, gradient history and `requires_grad`."""
    restore = tensors_restored(tensors)
    try:
        yield
    finally:
        restore()


def tensors_restored(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """A way back to what tensors are now: version counter, gradient history and `requires_grad`.

    A recording replaces tensors below autograd, so an in-place operation on a buffer changes no number but is
    counted and linked above.
    """
    before = [
        (tensor, tensor._version, tensor.requires_grad, tensor.grad_fn)
        for tensor in tensors
        if _counts(tensor)
    ]

    def restore() -> None:
        for tensor, version, required, history in before:
            if tensor.grad_fn is not history:
                tensor.detach_()
            if tensor.requires_grad != required:
                tensor.requires_grad_(required)
            if tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    return restore


def attributes_set_on(tensor: Tensor) -> dict[str, Any]:
    """What somebody has set on a tensor, besides what a fake one keeps there itself."""
    return {
        name: held
        for name, held in vars(tensor).items()
        if name not in _OF_FAKE and not name.endswith(_REMEMBERED)
    }


def without_functions() -> AbstractContextManager[Any]:
    """Look at tensors past all function modes and subclasses."""
    return torch._C.DisableTorchFunction()


def is_on(kind: str, value: object) -> bool:
    """Whether a tensor is on a kind of device; a fake one is asked past what answers questions of its own."""
    if not isinstance(value, Tensor):
        return False
    known = vars(value) if isinstance(value, FakeTensor) else {}
    device: torch.device = known.get("_fake_device") or known.get("fake_device") or value.device
    return device.type == kind


def writes_to(tensor: Tensor) -> int:
    """How often a tensor was written in place, as far as torch counts that."""
    return tensor._version if _counts(tensor) else 0


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Let torch count a write to each, which was made past autograd."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if _counts(tensor)])


def is_tracked_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view, with which its base is written."""
    return tensor._is_view()


def _counts(tensor: Tensor) -> bool:
    return not tensor.is_inference()


def share_memory(left: object, right: object) -> bool:
    """Whether two tensors look into the same part of one storage, and one sees what is written to the other.

    Storages are compared by identity, also without data; sparse tensors share none, and what is no tensor.
    What lies between the elements of a tensor counts as its own, and all of the storage where sizes are not
    known.
    """
    if not _is_strided(left) or not _is_strided(right) or storage_of(left) != storage_of(right):
        return False
    (begin, end), (other, last) = _reach_of(left), _reach_of(right)
    return begin < last and other < end


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...] | None:
    """Where dense tensors lie; None where one of them lies nowhere, or is of a class of its own."""
    found = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
            return None
        found.append(tensor.data_ptr())
    return tuple(found)


def lie_apart(written: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether nothing of what is written is seen by another tensor, written or not; by addresses."""
    rows = [(True, *_bytes_of(tensor)) for tensor in written] + [(False, *_bytes_of(one)) for one in others]
    reached, is_written = -inf, False
    for writes, begin, end in sorted(rows, key=itemgetter(1)):
        if begin < reached and (writes or is_written):
            return False
        is_written = writes or (is_written and begin < reached)
        reached = max(reached, end)
    return True


def _bytes_of(tensor: Tensor) -> tuple[float, float]:
    begin, end = _reach_of(tensor)
    start = tensor.data_ptr()
    return start, start + end - begin


def _is_strided(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _reach_of(tensor: Tensor) -> tuple[float, float]:
    """From which byte of its storage to which a tensor reaches."""
    numbers: tuple[Any, ...] = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    if any(type(number) is not int for number in numbers):
        return -inf, inf
    begin, sizes, steps = numbers[0], numbers[1 : 1 + tensor.dim()], numbers[1 + tensor.dim() :]
    reach = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) + 1
    return begin * tensor.itemsize, (begin + (0 if 0 in sizes else reach)) * tensor.itemsize


def write_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into tensors, many in one launch where they lie on a device."""
    pairs = [*zip(targets, values, strict=True)]
    alike = [pair for pair in pairs if all(map(_is_copied_by_kernels, pair))]
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [value for _, value in alike])
    for target, value in pairs if len(alike) < len(pairs) else ():
        if not (_is_copied_by_kernels(target) and _is_copied_by_kernels(value)):
            target.copy_(value)


def _is_copied_by_kernels(tensor: Tensor) -> bool:
    """Whether no class says itself what a copy into it is, as one whose values are quantised does."""
    is_plain = type(tensor) in PLAIN_TENSORS or not is_traceable_wrapper_subclass(tensor)
    return is_plain and _is_strided(tensor)


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory that a tensor looks into."""
    return int(tensor.untyped_storage()._cdata)


def autocast_state() -> tuple[tuple[str, str], ...]:
    """The device types that autocast is on for, each with its dtype."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = ("cpu", "cuda", "xpu", "mps")
    return tuple(
        (kind, str(torch.get_autocast_dtype(kind))) for kind in kinds if torch.is_autocast_enabled(kind)
    )


def autocast_in_words(state: tuple[tuple[str, str], ...]) -> str:
    """`cpu torch.bfloat16`, or `off`."""
    return ", ".join(f"{kind} {dtype}" for kind, dtype in state) or "off"


@contextmanager
def without_autocast(state: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Run operations as they are: the casts that autocast chose are part of the captured graph."""
    with ExitStack() as stack:
        for kind, _ in state:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def clear_autocast_cache(*, forced: bool = False) -> None:
    """Forget weights that autocast has cast, so that neither a capture nor eager meets the other's.

    The cache is one for all threads, so unless `forced` it is left alone where this thread does not use it.
    """
    if forced or autocast_state():
        torch.clear_autocast_cache()


def active_modes() -> tuple[str, ...]:
    """The classes of the function and dispatch modes that see every operation of this thread."""
    functions = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    dispatches = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    return tuple(type(mode).__name__ for mode in (*functions, *dispatches))


def default_device() -> torch.device:
    """Where tensors are made; another device than the CPU is a function mode, which is quickly seen."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else torch.device("cpu")

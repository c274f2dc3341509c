"""The tensors of a program's state in a file: numbers in safetensors, and beside them how they lie."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from whence._torch.fakes import FakeTensor
from whence.errors import Fault
from whence.interop.archive.records.checked import (
    listed,
    named_device,
    named_dtype,
    number,
    raise_unless,
    text,
    truth,
)

_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool),
    }
)
"""Those that every reader of safetensors knows; tensors of others are stored as bytes."""
_KINDS = {"tensor": Tensor, "parameter": nn.Parameter, "buffer": nn.Buffer}
_SHARED = "memory."


def written(state: Mapping[str, Tensor]) -> tuple[list[Any], bytes, list[Fault]]:
    """A row for each tensor, the numbers of all of them, and what cannot be stored.

    Tensors that lie in one memory are stored as that memory, and lie in one again.
    """
    numbers: dict[str, Tensor] = {}
    rows, faults = list[Any](), list[Fault]()
    shared, first = _shared_memories(state.values()), dict[int, str]()
    for name, tensor in state.items():
        if (known := first.setdefault(id(tensor), name)) != name:
            rows.append([name, known])
            continue
        if why := _storage_fault(tensor):
            faults.append(Fault(f"the tensor {name}", why=why))
            continue
        memory = None if tensor.is_meta else shared.get(_storage_address(tensor))
        if memory is not None and memory not in numbers:
            numbers[memory] = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage().cpu())
        elif memory is None and not tensor.is_meta:
            numbers[name] = _storable(tensor.detach())
        rows.append(_row(name, tensor, memory))
    return rows, safetensors.save(numbers), faults


def _storage_fault(tensor: Tensor) -> str:
    if isinstance(tensor, FakeTensor):
        return "it is a fake one, which has no numbers; save(..., weights=False) leaves weights out"
    if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, nn.Buffer):
        return f"it is a {type(tensor).__name__}, which is made of others"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"it has the layout {tensor.layout}, and only tensors with strides are stored"
    return ""


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shared_memories(tensors: Iterable[Tensor]) -> dict[int, str]:
    """The memories in which several tensors lie."""
    seen: dict[int, set[int]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter):
            seen.setdefault(_storage_address(tensor), set()).add(id(tensor))
    found = [memory for memory, held in seen.items() if memory and len(held) > 1]
    return {memory: f"{_SHARED}{position}" for position, memory in enumerate(found)}


def _storable(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    return tensor if tensor.dtype in _DTYPES else tensor.reshape(-1).view(torch.uint8)


def _row(name: str, tensor: Tensor, memory: str | None) -> list[Any]:
    kind = (
        "buffer"
        if isinstance(tensor, nn.Buffer)
        else "parameter"
        if isinstance(tensor, nn.Parameter)
        else "tensor"
    )
    return [
        name,
        kind,
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        list(tensor.shape),
        list(tensor.stride()),
        tensor.requires_grad,
        None if memory is None else [memory, tensor.storage_offset()],
    ]


def read(rows: Any, content: bytes | None) -> dict[str, Tensor]:
    """The tensors of these rows."""
    try:
        numbers = {} if content is None else safetensors.load(content)
    except SafetensorError as error:
        raise_unless(False, f"its tensors cannot be read: {error}")
    memories: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    for name, *row in map(listed, listed(rows)):
        found[text(name)] = found[row[0]] if len(row) == 1 else _read_tensor(name, numbers, memories, *row)
    return found


def _read_tensor(name: str, numbers: Mapping[str, Tensor], memories: dict[str, Any], *row: Any) -> Tensor:
    kind, dtype, device, shape, strides, requires_grad, memory = row
    wanted, sizes, steps = named_dtype(dtype), list(map(number, shape)), list(map(number, strides))
    raise_unless(min([0, *sizes, *steps]) >= 0, f"{name} has negative sizes")
    if named_device(device).type == "meta":
        made = torch.empty_strided(sizes, steps, dtype=wanted, device="meta")
    elif memory is None:
        made = _tensor_laid_out(numbers[name], wanted, sizes, steps)
    else:
        held, offset = listed(memory)
        storage = memories.setdefault(text(held), numbers[held].untyped_storage())
        made = torch.empty(0, dtype=wanted).set_(storage, number(offset), sizes, steps)
    made = made if made.is_meta else made.to(named_device(device))
    if kind == "parameter":
        return nn.Parameter(made, requires_grad=truth(requires_grad))
    raise_unless(kind in _KINDS, f"{kind!r} is no kind of tensor")
    made = nn.Buffer(made) if kind == "buffer" else made
    return made.requires_grad_() if truth(requires_grad) else made


def _tensor_laid_out(held: Tensor, dtype: torch.dtype, sizes: list[int], steps: list[int]) -> Tensor:
    plain = held if held.dtype == dtype else held.view(dtype).reshape(sizes)
    raise_unless(list(plain.shape) == sizes, "a tensor has another shape than its numbers")
    if list(plain.stride()) == steps:
        return plain
    made = torch.empty_strided(sizes, steps, dtype=dtype)
    raise_unless(made.untyped_storage().nbytes() <= max(4 * plain.nbytes, 64), "a tensor has large gaps")
    return made.copy_(plain)

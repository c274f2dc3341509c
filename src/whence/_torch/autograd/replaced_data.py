"""`tensor.data = value`: from there on the tensor's numbers are those of another node.

It happens behind autograd and the dispatcher, so it is caught where Python asks for it. Eager puts the memory
of `value` under the tensor; a program writes the numbers into the tensor's own. That is the same as long as
the memory is nobody else's.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.refusals import data_replaced
from whence._torch.tensors import share_memory

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

_FACTS = ("shape", "dtype", "device", "layout")
PUTS_DATA = "whence_puts_data"
"""On a node that writes: the tensor lies in the memory of what is written, from then on."""

_DATA_GETTER = type(torch.Tensor.data).__get__.__name__  # type: ignore[attr-defined]


def is_data(view: fx.Node) -> bool:
    """Whether a recorded view is `tensor.data`: of what is written through it autograd knows nothing, and
    finds it in the memory of what it has kept."""
    function, _ = view.meta.get("torch_fn", ("", ""))
    return view.target is torch.ops.aten.detach.default and function.startswith(_DATA_GETTER)


def replace_data(recorder: "Recorder", tensor: Tensor, value: Tensor) -> None:
    """Let `tensor` have the numbers of `value`; raises where a program would say something else."""
    if value is tensor:
        return  # `module.to` with what a module has already
    recorder.recognised([tensor, value])
    if _lies_there_already(recorder, tensor, value):
        return
    if (why := _misfit(recorder, tensor, value)) is not None:
        raise data_replaced(why, recorder.listener.model.here())
    recorder.listener.model.distrusted("the model puts other data under a tensor")
    if tensor.requires_grad and not recorder.is_joint:
        _write_instead(recorder, tensor, value)
        return
    if (begins := _placeholder(recorder, tensor)) is not None:
        recorder.adopted.replaced.setdefault(id(tensor), (tensor, begins))
    with torch.no_grad():
        alias = value.detach()
    if not recorder.adopted.stands_for(tensor, alias):
        recorder.tracer.tensor_tracker[tensor] = recorder.tracer.tensor_tracker[alias]


def _write_instead(recorder: "Recorder", tensor: Tensor, value: Tensor) -> None:
    """Write the numbers behind autograd's back, so that gradients arrive at the tensor as before."""
    before = len(recorder.graph.nodes)
    with torch.no_grad():
        tensor.detach().copy_(value.detach())
    written = next(reversed(recorder.graph.nodes))
    if len(recorder.graph.nodes) > before and written.target is torch.ops.aten.copy_.default:
        written.meta[PUTS_DATA] = True


def _placeholder(recorder: "Recorder", tensor: Tensor) -> fx.Node | None:
    """The input that a tensor is, or None for one that the model made."""
    adopted = recorder.adopted.nodes.get(id(tensor))
    return adopted or next((node for node in _given_nodes(recorder) if node.meta["val"] is tensor), None)


def _given_nodes(recorder: "Recorder") -> Iterable[fx.Node]:
    """The placeholders, found without a walk over the graph: averages replace the data of every weight."""
    return recorder.graph.find_nodes(op="placeholder", sort=False)


def replaced_inputs(recorder: "Recorder") -> list[tuple[fx.Node, fx.Node]]:
    """The placeholders of tensors that have other data now, each with the node that holds it."""
    pairs: list[tuple[fx.Node, Any]] = [
        (before, recorder.node_of(tensor)) for tensor, before in recorder.adopted.replaced.values()
    ]
    return pairs


def lies_under_another(recorder: "Recorder", value: Tensor) -> bool:
    """Whether a tensor lies in memory that was put under another one."""
    held = recorder.stand_in(value)
    others = (tensor for tensor, _ in recorder.adopted.replaced.values() if tensor is not value)
    return any(share_memory(recorder.stand_in(tensor), held) for tensor in others)


def _lies_there_already(recorder: "Recorder", tensor: Tensor, value: Tensor) -> bool:
    """Whether data of a tensor's own is put under it, as where it has the dtype and device already."""
    held = recorder.adopted.stand_in(tensor)
    if held is None:
        return False
    given = recorder.stand_in(value)
    is_there = share_memory(held, given) and held.storage_offset() == given.storage_offset()
    return is_there and _are_alike(held, given)


def _are_alike(held: Tensor, given: Tensor) -> bool:
    """Whether two tensors are of one shape, dtype and device, and lie in memory in the same way."""
    is_alike = all(getattr(held, fact) == getattr(given, fact) for fact in _FACTS)
    return is_alike and held.layout is torch.strided and held.stride() == given.stride()


def _misfit(recorder: "Recorder", tensor: Tensor, value: Tensor) -> str | None:
    if tensor.grad_fn is not None and not recorder.is_joint:
        return "it has a history, which autograd would look for behind what it had before"
    held, given = recorder.stand_in(tensor), recorder.stand_in(value)
    if not _are_alike(held, given):
        return "the data has another shape, dtype or device, or lies in memory otherwise"
    if not share_memory(given, held) and any(share_memory(given, taken) for taken in _held_data(recorder)):
        return "both would lie in one memory from then on, and a program has a value for each"
    return None


def _held_data(recorder: "Recorder") -> list[Any]:
    """Everything that is there when the model begins, and what got other data."""
    held = [node.meta["val"] for node in _given_nodes(recorder)]
    return held + [recorder.stand_in(tensor) for tensor, _ in recorder.adopted.replaced.values()]

"""What Python asks of tensors, where a recording knows the answer: every run has, or is to have, it."""

import operator
from collections.abc import Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from whence._torch.operators.schemas import OpOverload, traits, written_arguments
from whence._torch.operators.table import said_of
from whence._torch.sizes.numbers import ITEM
from whence._torch.tensors import storage_of

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

aten = torch.ops.aten
_EQUAL = aten.equal.default
_ENTRIES = frozenset(
    {aten._nnz.default, aten._values.default, aten._indices.default}
    | {aten.values.default, aten.indices.default}
)
"""What asks for the entries of a sparse tensor."""
_WRONG_BELOW_AUTOGRAD = frozenset({aten._sparse_softmax.default, aten._sparse_log_softmax.default})
"""PyTorch's kernels of these give zeros where autograd is passed by, as a program with a backward does."""
ASKING = frozenset({ITEM, _EQUAL}) | _ENTRIES | _WRONG_BELOW_AUTOGRAD
"""What asks for the number in a tensor, in whatever words, and what would be answered wrongly."""
_TRUTHS: tuple[object, ...] = (Tensor.__bool__, Tensor.item, torch._assert, torch.is_nonzero)


def constant_fold(
    recorder: "Recorder", func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What an operator of `ASKING` answers, or any that needs values where the example's decide; None where
    only a run knows. Raises where the answer would be wrong."""
    known = _known(recorder, func, args) if func in ASKING else None
    if known is not None or recorder.decider is None:
        return known
    return recorder.decider.answer(func, args, kwargs)


def _known(recorder: "Recorder", func: OpOverload, args: tuple[Any, ...]) -> Any:
    if func is ITEM:
        return _constant_number(recorder, *args)
    if func is not _EQUAL:
        return _refuse_sparse(recorder, func, args[0])
    left, right = args
    # Tensors of other shapes are not equal, whatever they hold: `torch.equal` looks at the shapes first.
    return False if recorder.environment is None and left.shape != right.shape else None


def _refuse_sparse(recorder: "Recorder", func: OpOverload, tensor: Tensor) -> None:
    """Raise where a program would compute something else: a fake of what is computed has no entries."""
    refused = recorder.listener.model.branches.refused
    if func in _WRONG_BELOW_AUTOGRAD:
        if recorder.is_joint:
            raise refused(func, "its kernel gives zeros outside of autograd", _DENSE)
    elif tensor.layout is torch.sparse_coo and tensor._nnz() == 0:
        raise refused(func, "how many entries a computed sparse tensor has, only its values say", _DENSE)


_DENSE = "compute with dense tensors there, or capture the model without that part"


def _constant_number(recorder: "Recorder", tensor: Tensor) -> Any:
    """The number in `tensor`, or a truth that the model goes on with; None where only a run has it."""
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
        return None
    node = recorder.node_of(tensor)
    if node is not None and (known := _computed(recorder, node)) is not None:
        return known
    return _required(recorder, tensor)


def _required(recorder: "Recorder", tensor: Tensor) -> bool | None:
    """What a truth has to be for the model not to raise; every run is to have it so."""
    asked = recorder.tracer.torch_fn_metadata
    is_inside = isinstance(asked, FunctionType)  # of torch's, in Python: what that asks, nobody tells
    is_number = asked is Tensor.item or is_inside
    if not (asked in _TRUTHS or is_inside) or (is_number and tensor.dtype is not torch.bool):
        return None
    if (stated := recorder.listener.model.stated(called=is_number)) is None:
        return None
    wanted, otherwise = stated
    with recorder:
        holds = tensor if wanted else torch.ops.aten.logical_not.default(tensor)
        torch.ops.aten._assert_async.msg(holds, otherwise)
    return wanted


def _computed(recorder: "Recorder", node: fx.Node) -> Any:
    """The number in a node that is made of numbers alone, computed."""
    needed = _leading_to(node)
    if not all(recorder.literals.get(row) is not None or _is_computable(row) for row in needed):
        return None
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
        for row in sorted(needed):
            literal = recorder.literals.get(row)
            args, kwargs = fx.map_arg((row.args, row.kwargs), values.__getitem__)
            kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            values[row] = literal.clone() if literal is not None else row.target(*args, **kwargs)  # type: ignore[operator]
        return values[node].item()


def _leading_to(node: fx.Node) -> set[fx.Node]:
    """What a value is computed from, and what writes to any of that."""
    writes = [
        (row, _memory_held(written_arguments(row.target, row.args, row.kwargs))) for row in _writing(node)
    ]
    found, waiting = {node}, [node]
    while waiting:
        row = waiting.pop()
        memory = _memory_held([row])
        sources = [*row.all_input_nodes, *(other for other, written in writes if written & memory)]
        waiting += [source for source in sources if source not in found]
        found.update(sources)
    return found


def _writing(node: fx.Node) -> list[fx.Node]:
    return [row for row in node.graph.nodes if row.op == "call_function" and traits(row.target).mutates]


def _memory_held(nodes: Iterable[Any]) -> set[int]:
    """The memory of what nodes hold."""
    held = (row.meta.get("val") for row in nodes if isinstance(row, fx.Node))
    return {storage_of(value) for value in held if isinstance(value, Tensor)}


def _is_computable(node: fx.Node) -> bool:
    """Whether an operator gives the same in every run and on every machine; the CPU finds what whole numbers
    on another device are, too."""
    if node.target is operator.getitem:
        return True
    value = node.meta.get("val")
    made = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(node.target, OpOverload) or not isinstance(made, Tensor):
        return False
    if made.device.type == "meta" or (made.device.type != "cpu" and not _is_integral(made)):
        return False
    return not traits(node.target).random and not said_of(node.target).gives_memory


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())

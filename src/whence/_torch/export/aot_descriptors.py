"""The classes of AOT autograd's descriptors, told apart."""

from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import JointWithDescriptors

from whence._torch.export.descriptors import DescribedValue
from whence._torch.pytrees import TreeSpec


def described(descriptor: Any) -> DescribedValue:
    match descriptor:
        case ParamAOTInput() | BufferAOTInput():
            return DescribedValue(state=descriptor.target)
        case PlainAOTInput():
            return DescribedValue(argument=descriptor.idx)
        case PlainAOTOutput():
            return DescribedValue(result=descriptor.idx)
        case TangentAOTInput():
            return _of("tangent", descriptor.output)
        case GradAOTOutput():
            return _of("gradient", descriptor.grad_of)
        case InputMutationAOTOutput():
            return _of("mutation", descriptor.mutated_input)
    return DescribedValue(other=type(descriptor).__name__)


def _of(role: str, descriptor: Any) -> DescribedValue:
    inner = described(descriptor)
    return DescribedValue(role, inner.state, inner.argument, inner.result, inner.other)


def joint_parts(graph: object) -> tuple[fx.GraphModule, TreeSpec | None] | None:
    """The graph of a `JointWithDescriptors`, and the structure of what its forward returns."""
    if not isinstance(graph, JointWithDescriptors):
        return None
    return graph.graph_module, graph.out_spec

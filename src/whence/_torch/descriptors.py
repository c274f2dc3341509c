"""What AOT autograd writes on the inputs and outputs of a joint graph, in words of our own."""

from collections.abc import Mapping
from dataclasses import dataclass
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

from whence._torch.trees import TreeSpec

NAMES_OF_STATE = "dynamo_flat_name_to_original_fqn"


@dataclass(frozen=True)
class Described:
    """What a value is: `state` a qualified name, `argument` or `result` a position, `other` a text.

    `role` is empty for the value itself, or `tangent`, `gradient` or `mutation` of it.
    """

    role: str = ""
    state: str | None = None
    argument: int | None = None
    result: int | None = None
    other: str = ""


def described(descriptor: Any) -> Described | None:
    """The description on an input or an output; None where there is none."""
    match descriptor:
        case None:
            return None
        case ParamAOTInput() | BufferAOTInput():
            return Described(state=descriptor.target)
        case PlainAOTInput():
            return Described(argument=descriptor.idx)
        case PlainAOTOutput():
            return Described(result=descriptor.idx)
        case TangentAOTInput():
            return _of("tangent", descriptor.output)
        case GradAOTOutput():
            return _of("gradient", descriptor.grad_of)
        case InputMutationAOTOutput():
            return _of("mutation", descriptor.mutated_input)
    return Described(other=type(descriptor).__name__)


def _of(role: str, descriptor: Any) -> Described:
    inner = described(descriptor) or Described()
    return Described(role, inner.state, inner.argument, inner.result, inner.other)


def joint_parts(graph: object) -> tuple[fx.GraphModule, TreeSpec | None] | None:
    """The graph of a `JointWithDescriptors`, and the structure of what its forward returns."""
    if not isinstance(graph, JointWithDescriptors):
        return None
    return graph.graph_module, graph.out_spec


def returned_structure(module: fx.GraphModule) -> TreeSpec | None:
    """The structure that a graph of `torch._dynamo.export` gives its flat results; None where it has none."""
    info = getattr(module.graph._codegen, "pytree_info", None)
    return None if info is None else info.out_spec


def names_of_state(module: fx.GraphModule) -> Mapping[str, str]:
    """The qualified names behind the flat names that Dynamo gave to state."""
    return dict(module.meta.get(NAMES_OF_STATE, {}))

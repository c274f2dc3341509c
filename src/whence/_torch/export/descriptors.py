"""What AOT autograd writes on the inputs and outputs of a joint graph, in words of our own.

What reads it is in `aot_descriptors`, imported when the first is met: AOT autograd brings sympy, which takes
as long to import as everything else here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.pytrees import TreeSpec

NAMES_OF_STATE = "dynamo_flat_name_to_original_fqn"
_AOT = "torch._functorch._aot_autograd."


@dataclass(frozen=True)
class DescribedValue:
    """What a value is: `state` a qualified name, `argument` or `result` a position, `other` a text.

    `role` is empty for the value itself, or `tangent`, `gradient` or `mutation` of it.
    """

    role: str = ""
    state: str | None = None
    argument: int | None = None
    result: int | None = None
    other: str = ""


def _aot() -> Any:
    return importlib.import_module("whence._torch.export.aot_descriptors")


def described(descriptor: Any) -> DescribedValue | None:
    """The description on an input or an output; None where there is none."""
    return None if descriptor is None else _aot().described(descriptor)


def joint_parts(graph: object) -> tuple[fx.GraphModule, TreeSpec | None] | None:
    """The graph of a `JointWithDescriptors`, and the structure of what its forward returns."""
    return _aot().joint_parts(graph) if type(graph).__module__.startswith(_AOT) else None


def returned_structure(module: fx.GraphModule) -> TreeSpec | None:
    """The structure that a graph of `torch._dynamo.export` gives its flat results; None where it has none."""
    info = getattr(module.graph._codegen, "pytree_info", None)
    return None if info is None else info.out_spec


def names_of_state(module: fx.GraphModule) -> Mapping[str, str]:
    """The qualified names behind the flat names that Dynamo gave to state."""
    return dict(module.meta.get(NAMES_OF_STATE, {}))

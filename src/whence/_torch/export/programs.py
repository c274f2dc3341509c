"""What torch.export keeps private about its graphs: who checks them, and what their operators say."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._export.verifier import SpecViolationError, Verifier
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from whence._torch.fakes import fake_like
from whence._torch.operators.schemas import HigherOrderOperator, OpOverload
from whence._torch.pytrees import tree_map_only
from whence._torch.tensors import storage_of

__all__ = [
    "HigherOrderOperator",
    "SpecViolationError",
    "Verifier",
    "came_through",
    "fakes_like",
    "in_a_mode_for_all",
    "looks_into",
    "ran_for",
    "shares_storage",
]


def looks_into(target: object) -> tuple[int, ...]:
    """The positions of arguments that results may share memory with, or that are written."""
    if not isinstance(target, OpOverload):
        return ()
    arguments = enumerate(target._schema.arguments)
    return tuple(position for position, argument in arguments if argument.alias_info is not None)


def fakes_like(values: Iterable[Any]) -> Callable[[Tensor], Tensor]:
    """Makes fake tensors that can be used together with the fake ones among `values`."""
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    known = mode or FakeTensorMode(allow_non_fake_inputs=True)
    return lambda tensor: known.from_tensor(tensor, static_shapes=True)


def in_a_mode_for_all() -> Callable[[Any], Any]:
    """Makes fake values like others in one new mode that takes other tensors, too, as torch.export's does.

    Compilers run a graph in the mode of its values, with the real parameters among the inputs.
    """
    modes: dict[int, FakeTensorMode] = {}
    sizes = importlib.import_module("torch.fx.experimental.symbolic_shapes")  # brings sympy

    def moved(fake: FakeTensor) -> Tensor:
        old = fake.fake_mode
        if id(old) not in modes:
            known = old.shape_env or sizes.ShapeEnv()  # inside of loops they are open where none else is
            modes[id(old)] = FakeTensorMode(allow_non_fake_inputs=True, shape_env=known)
        mode = modes[id(old)]
        with torch._C.DisableTorchFunction():
            if fake.layout is torch.strided:
                return fake_like(mode, fake, fake.shape, fake.stride()).requires_grad_(fake.requires_grad)
            with old:  # a sparse one has no strides to be made of
                found: Any = fake.detach()
        found.fake_mode = mode
        return found  # type: ignore[no-any-return]

    return lambda value: tree_map_only(FakeTensor, moved, value)


def shares_storage(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors look into one memory; sparse and other opaque ones are compared by identity."""
    if left is right:
        return True
    strided = left.layout == right.layout == torch.strided
    return strided and storage_of(left) == storage_of(right)


def ran_for(node: fx.Node) -> tuple[str, ...]:
    """The operators that were run when a node was recorded, as text: one for each `run_decompositions`.

    What is recorded while an operator runs takes over all that is known of it.
    """
    found, sources = [], node.meta.get("from_node")
    while sources:
        source = sources[-1]
        info, sources = source.node_info, source.from_node
        if info is not None and source.pass_name == "ExportedProgram.module()":
            found.append(str(info.target))
    return tuple(found)


def came_through(node: fx.Node) -> bool:
    """Whether the operator of a node is the one that was run each time, or its functional form."""
    target = node.target
    names = {str(target)}
    if isinstance(target, OpOverload):
        names.add(f"{target.namespace}.{target._opname}_.{target._overloadname}")
    ran = ran_for(node)
    return bool(ran) and names.issuperset(ran)

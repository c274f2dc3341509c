"""A graph of torch functions becomes one of operators, and what it says of each node goes along.

PyTorch's own means for this is `make_fx` over an interpreter of the graph, with metadata preserved. `make_fx`
is private to `torch.fx.experimental`; while it runs it watches `nn.Module` for every thread.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from whence._torch.pytrees import tree_map_only
from whence._torch.record.annotations import CUSTOM, said_of

WITHOUT_GRAD = "whence_without_grad"
"""The key, among a node's custom metadata, that says that it ran without gradients."""
TRACE = "whence_trace"
"""The key, among a node's custom metadata, of its stack trace, which would not be preserved otherwise."""


class _AnnotatingInterpreter(fx.Interpreter):
    """Runs a graph node by node, and notes on each what `make_fx` does not preserve."""

    def run_node(self, n: fx.Node) -> Any:
        noted = {WITHOUT_GRAD: not torch.is_grad_enabled(), TRACE: n.meta.get("stack_trace")}
        n.meta[CUSTOM] = {**said_of(n), **noted}
        return super().run_node(n)


def lowered(module: fx.GraphModule, values: list[Any]) -> fx.GraphModule:
    """The graph in terms of operators, on these fake values of its placeholders; its nodes are written on."""
    run = _AnnotatingInterpreter(module).run
    gradients = torch.is_grad_enabled()
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())
    try:
        with traceback.preserve_node_meta(), mode:
            return make_fx(run)(*values)
    finally:
        torch.set_grad_enabled(gradients)


def in_one_mode(values: list[Any]) -> list[Any]:
    """Fake values that can be used together; each keeps its layout, and whether it takes a gradient."""
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    if len(modes) == 1:
        (known,) = modes.values()
        return [
            known.from_tensor(value, static_shapes=True)
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            else value
            for value in values
        ]
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Tensor) -> Tensor:
        with mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad) if value.is_leaf else made

    return [tree_map_only(Tensor, fake, value) for value in values]

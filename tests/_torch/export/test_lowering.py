"""Canaries: `make_fx` over an interpreter keeps what the graph says of its nodes."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from whence._torch.export.lowering import TRACE, WITHOUT_GRAD, in_one_mode, lowered


@pytest.mark.canary("torch.fx.experimental.proxy_tensor.make_fx")
def test_functions_become_operators() -> None:
    """Metadata goes along, and so does whether gradients were on; the mode is given back."""
    assert callable(make_fx)
    whole = fx.Graph()
    x = whole.placeholder("x")
    whole.call_function(torch._C._set_grad_enabled, (False,))
    tanh = whole.call_function(torch.tanh, (x,))
    tanh.meta |= {"nn_module_stack": {"0": ("a", nn.Tanh)}, "stack_trace": "line"}
    whole.output(tanh)
    made = lowered(fx.GraphModule({}, whole), in_one_mode([torch.randn(2)]))
    (found,) = (node for node in made.graph.nodes if node.op == "call_function")
    assert found.target is torch.ops.aten.tanh.default
    assert found.meta["nn_module_stack"] == {"0": ("a", nn.Tanh)}
    assert (found.meta["custom"][WITHOUT_GRAD], found.meta["custom"][TRACE]) == (True, "line")
    assert torch.is_grad_enabled()


def test_values_of_several_modes() -> None:
    """Values of several modes are made anew in one, each with its layout; of one mode they stay."""
    with FakeTensorMode():
        left = torch.empty(2, 3).t().requires_grad_()
    with FakeTensorMode():
        right = torch.empty(4)
    one, other = in_one_mode([left, right])
    assert one.fake_mode is other.fake_mode
    assert (one.stride(), one.requires_grad) == (left.stride(), True)
    same, real = in_one_mode([left, torch.zeros(2)])
    assert same is left and isinstance(real, FakeTensor)

"""What C++ is told of a device that is not here, and what Python is."""

import pytest
import torch
from torch import Tensor, fx, nn

import whence
from whence._torch.elsewhere.recorder import OF_THE_DEVICE


class Asking(nn.Module):
    """Asks its tensors where they are, and makes others there."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))
        self.answers: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.device == x.device == torch.device("cuda", 0)
        assert x.is_cuda
        assert not x.is_cpu
        assert not x.is_meta
        assert x.get_device() == 0
        assert x.to("cuda") is x
        assert x.to(x.device) is x
        assert x.cuda() is x
        made = torch.arange(4, device=x.device) + x.new_ones(4) + torch.zeros_like(x)
        numbers = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        assert made.is_cuda
        assert numbers.is_cuda
        return (x * self.weight + made + numbers.to(x.dtype) + self.offset).to("cpu")


def test_models_are_told_what_they_are_told_there() -> None:
    """The device of parameters, buffers, inputs, and of what is made of them."""
    program = whence.capture(Asking(), (torch.ones(4),), device="cuda", backward=True)
    gradient = program.node(str(program.output("weight").node))
    assert gradient.meta["val"].device == torch.device("cuda", 0)
    here = [node.name for node in program.graph.nodes if is_on_cpu(node)]
    literal = [] if torch.cuda.is_available() else ["c_lifted_tensor_0", "tangent_0", "lift_fresh_copy"]
    assert here == [*(literal or ["tangent_0"]), "_to_copy"]


def is_on_cpu(node: fx.Node) -> bool:
    """Whether its value is a tensor on the CPU."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


class Gated(nn.Module):
    """An activation whose derivative is one operator on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.linear(self.norm(x)))


@pytest.mark.canary("torch.library._scoped_library", "torch._subclasses.fake_tensor.FakeTensorMode.dispatch")
def test_operators_with_a_kernel_there_stay_whole() -> None:
    """A PyTorch without the device takes them apart, and does so again afterwards."""
    program = whence.capture(Gated(), (torch.randn(2, 8),), device="cuda:sm90", backward=True)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("aten.silu_backward.default") == 1
    assert names.count("aten._fused_rms_norm.default") == 1
    assert names.count("aten._fused_rms_norm_backward.default") == 1
    assert torch.ops.aten.silu_backward in OF_THE_DEVICE

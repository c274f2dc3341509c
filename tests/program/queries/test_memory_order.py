"""Values that kernels read as contiguous, wherever a run has them otherwise."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.program.queries.memory_order import gathered, in_memory_order, order_if_dense, with_gathered

X = torch.linspace(-1, 1, 48).view(2, 6, 4)


class Grouped(nn.Module):
    """A group norm, of which a joint program has the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.sin(), 3)


@pytest.fixture(scope="module")
def program() -> whence.Program:
    return whence.capture(Grouped(), (X.clone().requires_grad_(),), backward=True)


def test_arguments_that_are_gathered(program: whence.Program) -> None:
    """A kernel says which, and each has the order of the capture."""
    orders = {node.name: list(gathered(node)) for node in program.graph.nodes}
    assert {name: order for name, order in orders.items() if order} == {
        "native_group_norm": [(0, (0, 1, 2))],
        "native_group_norm_backward": [(0, (0, 1, 2)), (1, (0, 1, 2))],
    }


def test_arguments_of_a_run(program: whence.Program) -> None:
    """What lies otherwise is copied, and what lies so is handed on."""
    node = program.node("native_group_norm")
    turned = X.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    ((as_it_is, *_), (copied, *_)) = (with_gathered(node, [x, *node.args[1:]]) for x in (X, turned))
    assert as_it_is is X
    assert copied.is_contiguous()
    assert torch.equal(copied, X)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_order(order: tuple[int, ...]) -> None:
    """What is laid out in an order lies in it."""
    assert order_if_dense(in_memory_order(X, order)) == order


@pytest.mark.parametrize("value", [X[..., ::2], X[:, :1].expand(2, 6, 4), X[0, 0], X.to_sparse(), 3])
def test_nothing_dense(value: object) -> None:
    """What leaves memory out, overlaps, has no order or no strides."""
    assert order_if_dense(value) is None


def test_values_on_the_way(program: whence.Program) -> None:
    """`run` reads a gradient as a tree does."""
    x, gradient = X.clone().requires_grad_(), torch.linspace(0.5, 1.5, 48).view(4, 6, 2).permute(2, 1, 0)
    (expected,) = torch.autograd.grad(Grouped()(x), x, gradient)
    last = program.graph.output_node().all_input_nodes[-1]
    found = program.run((x,), inputs={"tangent_0": gradient}, read=last.name)
    assert torch.equal(found[last.name], expected)

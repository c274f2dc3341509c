"""Exported programs with tensors that are made of others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import whence

FALSE_ALARM = pytest.mark.filterwarnings("ignore")
"""PyTorch's decomposition warns of itself."""


class Casting(nn.Module):
    """Moves a weight that is made of two to another dtype and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(torch.float64).to(torch.float32)


class Model(nn.Module):
    """A child with such a weight, whose calling convention is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.head = Casting(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.child(x)).sum()


def same(left: Any, right: Any) -> bool:
    """Whether both parts agree."""
    return isinstance(left, TwoTensor) and torch.equal(left.a, right.a) and torch.equal(left.b, right.b)


@FALSE_ALARM
def test_row_129_a_weight_of_two_feeds_a_preserved_child() -> None:
    """The tree of the export and of a capture compute what eager does, whole and child by child."""
    model, x = Model(), torch.randn(2, 4)
    exported = torch.export.export(model, (x,), preserve_module_call_signature=("child",))
    captured = whence.capture(model, (x,), preserve_calls=["child"])
    for tree in (whence.unflatten(exported), captured.unflatten()):
        assert same(tree(x), model(x))
        assert same(tree.get_submodule("child")(x), model.child(x))


@FALSE_ALARM
def test_row_129_after_decomposition_it_is_refused() -> None:
    """The decomposition takes the weight and the result apart; that is said, and what to do."""
    model, x = Model(), torch.randn(2, 4)
    decomposed = torch.export.export(model, (x,)).run_decompositions({})
    with pytest.raises(whence.UnsupportedGraph) as caught:
        whence.unflatten(decomposed)
    assert "the graph returns 2 values, and the model 1" in str(caught.value)
    assert "taken apart by run_decompositions" in str(caught.value)
    assert "unflatten it before run_decompositions" in str(caught.value)

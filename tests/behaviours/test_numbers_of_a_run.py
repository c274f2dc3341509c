"""Numbers that only a run has, in indices, truths, slices and in functions that operators run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.tracing.failing import Doing

X, ONE = torch.randn(3, 4), torch.tensor(1)


def written(y: Tensor, n: Any) -> Tensor:
    y = y.clone()
    y[:, n] = y[0, n]
    return y


USES: dict[str, Callable[[Tensor, Any], Any]] = {
    "row": lambda y, n: y[n],
    "column": lambda y, n: y[:, n],
    "from the end": lambda y, n: y[-n],
    "last": lambda y, n: y[..., n],
    "beside new dimensions": lambda y, n: y[None, :, n, None],
    "beside a mask": lambda y, n: torch.stack([y, y])[torch.ones(2, 3).bool(), n],
    "beside an index": lambda y, n: torch.stack([y, y])[torch.tensor([1, 0]), n, :2],
    "written": written,
    "selected": lambda y, n: y.select(0, n),
    "sliced": lambda y, n: y[:n] * torch.ones(y[:n].shape[0], 1),
    "split": lambda y, n: y.tensor_split([n, n + 1]),
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("use", USES)
def test_numbers_that_index(use: str, backward: bool) -> None:
    """What eager gives for any number, and its gradients, flat and as a tree."""
    model = Doing(lambda self, both: USES[use](self.linear(both[0]), both[1].item()))
    program = whence.capture(model, ((X, ONE),), dynamic_shapes={}, backward=backward)
    for number in (1, 2):
        inputs = ((X, torch.tensor(number)),)
        assert program.verify(model, inputs).ok
        found, expected = program.unflatten()(*inputs), model(*inputs)
        assert all(map(torch.equal, found, expected))


def test_truths() -> None:
    """A truth is a result, a factor and a value to fill with; what branches on it is refused, by its name."""
    model = Doing(lambda self, both: (self.linear(both[0]) * both[1].item(), both[1].item()))
    program = whence.capture(model, ((X, torch.tensor(True)),), dynamic_shapes={}, backward=True)
    for truth in (True, False):
        inputs = ((X, torch.tensor(truth)),)
        assert program.verify(model, inputs).ok
        assert program.unflatten()(*inputs)[1] is truth
    with pytest.raises(whence.DataDependent, match="whether item == 1 decides"):
        whence.capture(lambda x, t: x.sin() if t.item() else x, (X, torch.tensor(True)), dynamic_shapes={})


@pytest.mark.parametrize(
    ("model", "backward"),
    [
        (lambda x, i: (lambda n: torch.cond(x.sum() > 1, lambda x: x * n, torch.sin, (x,)))(i.item()), False),
        (lambda x, i: torch.cond(x.sum() > 1, lambda x, i: x * i.item(), lambda x, i: x.sin(), (x, i)), True),
    ],
    ids=["closed over", "differentiated"],
)
def test_numbers_in_branches_are_refused(model: Any, backward: bool) -> None:
    """The graph of a branch, or of its derivative, does not get the number; the tensor does."""
    with pytest.raises(whence.DataDependent, match=r"use the tensor in the place of its \.item\(\)"):
        whence.capture(model, (X.clone().requires_grad_(), ONE), dynamic_shapes={}, backward=backward)

"""Results are what eager gives, to the type; parameters among arguments and results."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whence
from tests.checks import Backward, gradients


class Sizing(nn.Module):
    """Returns sizes everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), x.shape, {"sizes": [x.shape[1:], torch.Size([]), x.stride()]}


def types_of(result: Any) -> Any:
    """The types in a result."""
    match result:
        case list() | tuple():
            return type(result), [types_of(part) for part in result]
        case dict():
            return {key: types_of(part) for key, part in result.items()}
    return type(result)


class Writing(nn.Module):
    """Returns what it writes into zeros, as it is afterwards, and something that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = torch.zeros(2, 4)
        held[0] = self.linear(x)[0]
        held[1:, :2] = 3.0
        return held, torch.zeros(3).index_put((torch.tensor([0]),), x[0, 0])


@pytest.mark.parametrize("backward", [False, True, lambda results: results[0].sum()])
def test_what_requires_a_gradient(backward: Backward) -> None:
    """A result that was written in place requires a gradient where eager's does, also beside a loss."""
    model, x = Writing(), torch.randn(2, 4)
    program = whence.capture(model, (x,), backward=backward)
    for module in (program.module(), program.unflatten()):
        results = module(x)[1] if callable(backward) else module(x)
        assert [result.requires_grad for result in results] == [True, False]


class OwnLeaf(nn.Module):
    """Returns leaves that it makes itself, beside what it computes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        match self.way:
            case "detached":
                return y.detach().requires_grad_(), y.sin()
            case "made":
                return torch.zeros(3, requires_grad=True) + 1, y.sin()
            case "between":
                leaf = y.detach().requires_grad_()
                return leaf, leaf * 2, self.linear(leaf)
        with torch.no_grad():
            view = y.view(-1)
        return view, y.sin()


@pytest.mark.parametrize("way", ["detached", "made", "viewed"])
def test_leaves_that_the_model_made(way: str) -> None:
    """They require gradients as eager's do, and the others among the results train."""
    model, x = OwnLeaf(way), torch.randn(2, 4)
    program = whence.capture(model, (x,))
    model(x)[1].sum().backward()
    expected = gradients(model)
    for module in (program.module(), program.unflatten()):
        model.zero_grad()
        leaf, other = module(x)
        assert leaf.requires_grad
        other.sum().backward()
        assert {name: str(found) for name, found in gradients(model).items()} == {
            name: str(found) for name, found in expected.items()
        }


def test_results_that_depend_on_a_leaf_of_the_model() -> None:
    """Which gradients the leaf would get is not in the graph: asking for them raises, and says why."""
    model, x = OwnLeaf("between"), torch.randn(2, 4)
    leaf, *others = whence.capture(model, (x,)).unflatten()(x)
    assert leaf.requires_grad
    for result in others:
        with pytest.raises(whence.WhenceError, match="requires_grad_"):
            result.sum().backward()


def test_result_that_looks_as_if_it_required_a_gradient() -> None:
    """A view made under `no_grad` says so, and has no history: there is nothing to differentiate."""
    with pytest.raises(whence.InvalidLoss, match="no output requires a gradient"):
        whence.capture(Looking(), (torch.randn(2, 4),), backward=True)


class Looking(nn.Module):
    """Looks at what it computed, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            return y.view(-1)


@pytest.mark.parametrize("shapes", [None, ({0: torch.export.Dim("batch")},)], ids=["fixed", "open"])
@pytest.mark.parametrize("backward", [False, True])
def test_sizes_among_results(backward: bool, shapes: Any) -> None:
    """`torch.Size` is a `torch.Size`, also nested, of the flat module and of the tree."""
    model, x = Sizing(), torch.randn(2, 4)
    program = whence.capture(model, (x,), backward=backward, dynamic_shapes=shapes)
    expected = model(x)
    for module in (program.module(), program.unflatten()):
        found = module(x)
        assert types_of(found) == types_of(expected)
        assert found[1:] == expected[1:]


def test_sizes_among_the_results_of_a_step() -> None:
    """A bound step returns what the step returns."""
    model, x = Sizing(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Any:
        loss = model(x)[0].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.shape, loss.detach()

    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    assert types_of(program.bind(model, optimizer)(x)) == types_of(step(x))


class Given(nn.Module):
    """Takes a weight that may be its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self.linear(x).sin(), weight) + (weight * weight).sum()


def test_parameter_as_its_own_argument() -> None:
    """A forward-only program gives eager's gradient; where it is captured it is refused by name."""
    model, x = Given(), torch.randn(3, 4)
    program = whence.capture(model, (x, model.linear.weight))
    model(x, model.linear.weight).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    program.unflatten()(x, model.linear.weight).sum().backward()
    assert {name: str(gradient) for name, gradient in gradients(model).items()} == {
        name: str(gradient) for name, gradient in expected.items()
    }
    losses: list[Backward] = [True, torch.sum]
    for backward in losses:
        with pytest.raises(whence.UnsupportedInput, match=r"args\[1\] is the model's own linear.weight"):
            whence.capture(model, (x, model.linear.weight), backward=backward)
    assert whence.capture(model, (x, model.linear.weight.detach()), backward=True).has_backward


def test_parameter_as_the_argument_of_a_step() -> None:
    """It would get its gradient under two names."""
    model, x = Given(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, weight: Tensor) -> None:
        model(x, weight).sum().backward()
        optimizer.step()

    with pytest.raises(whence.UnsupportedInput, match=r"args\[1\] is the model's own linear.weight"):
        whence.capture_step(step, (x, model.linear.weight), model=model, optimizer=optimizer)


class Returning(nn.Module):
    """Returns a weight, and uses it in so many places."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.times):
            x = self.linear(x)
        return x, self.linear.weight


@pytest.mark.parametrize("times", [1, 2])
def test_parameter_among_the_results(times: int) -> None:
    """Its gradient is eager's, or the capture with tangents is refused: eager adds in another order."""
    model, x = Returning(times), torch.randn(3, 4)
    for backward in (False, lambda results: results[0].sum() + results[1].sum()):
        assert whence.capture(model, (x,), backward=backward).verify(model, (x,)).ok
    if times == 1:
        assert whence.capture(model, (x,), backward=True).verify(model, (x,)).ok
        return
    with pytest.raises(whence.UnsupportedInput, match=r"returns its own linear\.weight"):
        whence.capture(model, (x,), backward=True)

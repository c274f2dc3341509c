"""A branch of which one side only raises states what holds: every run of the program looks at it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import whence
from tests.checks import verified
from tests.tracing import requiring
from tests.tracing.failing import Doing
from tests.tracing.requiring import WAYS

FROM_PYTORCH = "Expected parameter to satisfy its distribution constraint"
"""What PyTorch 2.15 asserts by itself where it is told that it is compiling."""


@pytest.fixture(autouse=True)
def distributions_that_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo turns that off for the process when somebody compiles."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shapes", [None, {}], ids=["fixed", "open"])
@pytest.mark.parametrize("way", WAYS)
def test_a_requirement_is_looked_at_in_every_run(way: Callable[..., None], shapes: Any) -> None:
    """Joint and forward, flat and tree, are eager where it holds; else they raise and name the line."""
    said = rf"requires otherwise \(.*{requiring.__file__}:\d+ in {way.__name__}|{FROM_PYTORCH}"

    def body(self: Any, x: Tensor) -> Tensor:
        way(self, x)
        return self.linear(x)

    model = Doing(body)
    for backward in (False, True):
        program = whence.capture(model, (torch.zeros(2, 4),), backward=backward, dynamic_shapes=shapes)
        assert program.verify(model, (torch.ones(2, 4),)).ok
        for run in (program.module(), program.unflatten()):
            with pytest.raises(RuntimeError, match=said):
                run(torch.full((2, 4), 9.0))


def test_both_sides_go_on() -> None:
    """A branch that computes on both sides is refused as ever, in an assertion's message, too."""

    def warns(_: nn.Module, x: Tensor) -> Tensor:
        if x.gt(5).any():
            x = x.clamp(max=5)
        return x

    with pytest.raises(whence.DataDependent, match="a branch"):
        whence.capture(Doing(warns), (torch.zeros(4),))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: distributions.Normal(x, 1.0).log_prob(x.detach()),
        lambda x: distributions.Normal(x, x.exp()).rsample(),
        lambda x: distributions.Categorical(logits=x).log_prob(torch.tensor([0, 1])),
        lambda x: distributions.Dirichlet(x.exp()).log_prob(x.detach().softmax(-1)),
        lambda x: distributions.MultivariateNormal(x, torch.eye(4)).log_prob(x.detach()),
        lambda x: distributions.kl_divergence(
            distributions.Gamma(x.exp(), 1.0), distributions.Gamma(2.0, 1.0)
        ),
    ],
    ids=["normal", "sampled", "categorical", "dirichlet", "multivariate", "divergence"],
)
def test_distributions_validate(make: Callable[[Tensor], Tensor]) -> None:
    """With validation, as it is by default: values, gradients and the generator are eager's."""
    verified(Doing(lambda self, x: make(self.linear(x))), torch.randn(2, 4), backward=torch.sum)


def listed(x: Tensor) -> Any:
    return torch.tensor([1, 2]).tolist()[1]


def of_sizes(x: Tensor) -> Any:
    return torch.tensor(x.shape).prod().item()


def of_range(x: Tensor) -> Any:
    return sum(value.item() for value in torch.linspace(0, 1, 3))


def written(x: Tensor) -> Any:
    table = torch.zeros(3, dtype=torch.long)
    row = table[1:]
    table.add_(2)
    row[0] = 5
    return [*table.tolist(), float(row.sum())][1]


def decided(x: Tensor) -> Any:
    return 3 if torch.ones(3).all() else 4


@pytest.mark.parametrize("number", [listed, of_sizes, of_range, written, decided])
def test_numbers_made_of_numbers_are_known(number: Callable[[Tensor], Any]) -> None:
    """What a model computes of sizes and constants with torch functions is the same in every run."""
    verified(Doing(lambda self, x: self.linear(x) * number(x)), torch.randn(2, 4), backward=torch.sum)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.rand(2),
        lambda x: torch.empty(2),
        lambda x: torch.zeros(2).add_(x.sum()),
        lambda x: torch.zeros(3).index_put_((torch.tensor(0),), x.sum())[1:],
    ],
    ids=["random", "empty", "written", "written through a view"],
)
def test_numbers_of_data_are_not_known(made: Callable[[Tensor], Tensor]) -> None:
    """Random numbers, memory as it was, and what data were written to, also beside it."""
    with pytest.raises(whence.DataDependent, match="needs the value of"):
        whence.capture(lambda x: x if made(x).tolist()[0] > 0 else -x, (torch.ones(4),))

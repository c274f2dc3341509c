"""`tensor.data = value` gives eager's numbers, or is refused where a program would say something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import differing, gradients, state

X = torch.arange(8.0).view(2, 4) / 4


class Replacing(nn.Module):
    """Puts other data under its tensors."""

    mean: Tensor
    other: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.linear = body, nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def average(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = 0.9 * m.mean + 0.1 * x.mean(0)
    return m.linear(x) * m.mean


def written_before_and_after(m: Replacing, x: Tensor) -> Tensor:
    m.mean.add_(1)
    m.mean.data = m.mean * 2 + x.mean(0)
    m.mean.mul_(3)
    return m.linear(x) * m.mean


def written_through_the_value(m: Replacing, x: Tensor) -> Tensor:
    value = x.mean(0)
    m.mean.data = value
    value += 1
    return m.linear(x) * m.mean


def its_own(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = m.mean.data.view(2, 2).view(4)
    m.mean += 1
    return m.linear(x) * m.mean


def of_an_activation(m: Replacing, x: Tensor) -> Tensor:
    hidden = torch.zeros(2, 4)
    hidden.data = x * 2
    return m.linear(hidden)


def of_the_argument(m: Replacing, x: Tensor) -> Tensor:
    x.data = x * 2
    return m.linear(x)


def of_a_parameter(m: Replacing, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data.clamp(-0.1, 0.1)
    return m.linear(x)


def of_a_parameter_written_again(m: Replacing, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.data = torch.renorm(m.linear.weight, 2, 0, 0.1)
        m.linear.weight.mul_(2)
    return m.linear(x) @ m.linear.weight


def written_after_it_was_used(m: Replacing, x: Tensor) -> Tensor:
    """Autograd keeps the tensor itself, and finds the new numbers there."""
    product = m.linear(x) @ m.linear.weight
    m.linear.weight.data.mul_(2)
    return product


BODIES = [
    *(average, written_before_and_after, written_through_the_value),
    *(its_own, of_an_activation, of_the_argument),
    *(of_a_parameter, of_a_parameter_written_again, written_after_it_was_used),
]


def one_run(module: nn.Module, *, has_loss: bool) -> dict[str, Any]:
    x = X.clone()
    found = module(x)
    loss, found = found if has_loss else (found.sin().sum(), found)
    loss.backward()
    return {"output": found.detach(), "argument": x, **gradients(module), **state(module)}


@pytest.mark.sample(6)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("backward", [False, lambda found: found.sin().sum()], ids=["forward", "loss"])
def test_other_data_is_eager(body: Callable[[Any, Tensor], Tensor], backward: Any) -> None:
    """What is read afterwards, what is written later, and what is left."""
    program = whence.capture(Replacing(body), (X.clone(),), backward=backward)
    expected = one_run(Replacing(body), has_loss=False)
    for module in (program.module(copy=True), program.unflatten(copy=True)):
        assert differing(expected, one_run(module, has_loss=bool(backward))) == []


def shared_state(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = m.other
    return m.linear(x) * m.mean


def shared_value(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = m.other.data = x.mean(0)
    return m.linear(x) * m.mean


def shared_argument(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = x[0]
    return m.linear(x) * m.mean


def of_another_size(m: Replacing, x: Tensor) -> Tensor:
    m.mean.data = x.mean(0, keepdim=True)
    return m.linear(x) * m.mean


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (shared_state, "in one memory"),
        (shared_value, "in one memory"),
        (shared_argument, "in one memory"),
        (of_another_size, "another shape"),
    ],
)
def test_what_a_program_cannot_say_is_refused(body: Any, words: str) -> None:
    """Two tensors in one memory, and data of another shape."""
    with pytest.raises(whence.UnsupportedMutation, match=words):
        whence.capture(Replacing(body), (X.clone(),))


def replaced_after_it_was_used(m: Replacing, x: Tensor) -> Tensor:
    found = m.linear(x)
    m.linear.weight.data = m.linear.weight.data.clamp(-0.1, 0.1)
    return found


def shared_with_what_is_written(m: Replacing, x: Tensor) -> Tensor:
    value = m.linear.weight.detach() * 2
    m.linear.weight.data = value
    value.add_(1)
    return m.linear(x)


def shared_with_what_is_looked_into(m: Replacing, x: Tensor) -> Tensor:
    value = m.linear.weight.detach() * 2
    row = value[0]
    m.linear.weight.data = value
    with torch.no_grad():
        m.linear.weight.mul_(2)
    return m.linear(x) * row


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (replaced_after_it_was_used, "it has been used"),
        (shared_with_what_is_written, "shares the memory"),
        (shared_with_what_is_looked_into, "shares the memory"),
    ],
)
def test_parameters_are_refused_in_a_forward_where_a_joint_capture_knows(body: Any, words: str) -> None:
    """What autograd kept, and writes to a memory of two, are there as they are only in a backward."""
    with pytest.raises(whence.UnsupportedMutation, match=words):
        whence.capture(Replacing(body), (X.clone(),))
    program = whence.capture(Replacing(body), (X.clone(),), backward=torch.sum)
    model = Replacing(body)
    model(X.clone()).sum().backward()
    tree = program.unflatten(copy=True)
    tree(X.clone())[0].backward()
    assert differing({**gradients(model), **state(model)}, {**gradients(tree), **state(tree)}) == []

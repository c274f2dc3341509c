"""`tensor.data = value` gives eager's numbers, or is refused where a program would say something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import differing, gradients, state, verified

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


def what_tanh_keeps(m: Replacing, x: Tensor) -> Tensor:
    hidden = m.linear(x).tanh()
    hidden.data.mul_(2)
    return hidden


def a_factor(m: Replacing, x: Tensor) -> Tensor:
    """What is written is read by nobody but the backward."""
    hidden = m.linear(x)
    product = hidden * hidden
    hidden.data[0] = 3
    return product


def a_view_of_a_factor(m: Replacing, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    product = hidden.t() @ hidden
    hidden.data.clamp_(-0.1, 0.1)
    return product.sum() + hidden


def rows_one_after_the_other(m: Replacing, x: Tensor) -> Tensor:
    hidden = m.linear(x).exp()
    before = hidden * hidden
    hidden[0].data.mul_(3)
    between = hidden * hidden
    hidden.data.detach().view(-1)[2:5].zero_()
    return before + between * hidden


def what_is_read_through_data(m: Replacing, x: Tensor) -> Tensor:
    """Autograd keeps another tensor over the same memory."""
    hidden = m.linear(x)
    data = hidden.data
    data.mul_(2)
    product = m.mean * m.linear(data) * data
    hidden.data.add_(1)
    return product + hidden


def a_view_that_was_written_before(m: Replacing, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    row = hidden[0]
    row.mul_(2)
    product = row * row
    hidden.data.mul_(3)
    return product + hidden


def what_needs_no_gradient(m: Replacing, x: Tensor) -> Tensor:
    factor = x.exp()
    product = m.linear(x) * factor
    factor.data.mul_(2)
    return product


def what_the_caller_gave(m: Replacing, x: Tensor) -> Tensor:
    product = m.linear(x)
    x.data.mul_(2)
    return product + m.linear(x)


def a_parameter_again_and_again(m: Replacing, x: Tensor) -> Tensor:
    weight = m.linear.weight
    first = weight * weight
    weight.data.mul_(2)
    second = weight * weight
    weight.data[0].add_(3)
    return m.linear(x) @ (first + second * weight)


def a_parameter_written_both_ways(m: Replacing, x: Tensor) -> Tensor:
    weight = m.linear.weight
    with torch.no_grad():
        weight.mul_(2)
    first = weight * weight
    weight.data.mul_(2)
    return m.linear(x) @ first


WRITTEN = [
    *(what_tanh_keeps, a_factor, a_view_of_a_factor, rows_one_after_the_other, what_is_read_through_data),
    *(
        a_view_that_was_written_before,
        what_needs_no_gradient,
        what_the_caller_gave,
        a_parameter_again_and_again,
    ),
    a_parameter_written_both_ways,
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("body", WRITTEN, ids=lambda body: body.__name__)
def test_what_is_written_through_data_has_the_gradients_of_eager(body: Any, tmp_path: Path) -> None:
    """Autograd reads what it has kept where it lies, and finds there what was written meanwhile."""
    program = whence.capture(Replacing(body), (X.clone(),))
    expected = one_run(Replacing(body), has_loss=False)
    program.save(tmp_path / "program")
    loaded = whence.load(tmp_path / "program")
    lean = program.apply(whence.rewriting.DeadCode())
    made = (program.module(copy=True), program.unflatten(copy=True), loaded.module(), lean.module(copy=True))
    for module in made:
        assert differing(expected, one_run(module, has_loss=False)) == []


class Layer(nn.Module):
    """One of several that are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).tanh()
        hidden.data.mul_(2)
        return hidden * hidden + x.sin().cos().exp().tanh()


class Layers(nn.Module):
    """Runs each in turn, one of them under a checkpoint if asked to."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.is_checkpointed = nn.ModuleList(Layer() for _ in range(3)), is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return checkpoint(self.layers[0], x, use_reentrant=False) if self.is_checkpointed else x


def test_layers_that_write_through_data_are_recorded_each() -> None:
    """A forward program of a repeated layer ended in "derivative for aten::copy is not implemented"."""
    verified(Layers(), X.clone().requires_grad_())


def test_what_a_checkpoint_writes_through_data_is_refused_in_the_backward() -> None:
    """It is written once more there, unless the checkpoint has all that it needs before."""
    program = whence.capture(Layers(is_checkpointed=True), (X.clone(),))
    with pytest.raises(whence.errors.NotDifferentiable, match="a checkpoint that writes again"):
        program.module(copy=True)(X.clone()).sum().backward()


def test_what_is_written_under_no_grad_and_kept_is_refused_as_in_eager() -> None:
    """There autograd notices; a program gave some numbers."""

    def body(m: Replacing, x: Tensor) -> Tensor:
        hidden = m.linear(x).tanh()
        hidden.detach().mul_(2)
        return hidden

    program = whence.capture(Replacing(body), (X.clone(),))
    for module in (Replacing(body), program.module(copy=True), program.unflatten(copy=True)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(X.clone()).sum().backward()

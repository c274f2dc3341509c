import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.failing import BAD_LOSSES, Doing, Failure, linear

X = torch.ones(2, 4)


@pytest.mark.parametrize("failure", BAD_LOSSES, ids=lambda failure: failure.name)
def test_bad_loss_raises_its_own_kind(failure: Failure) -> None:
    """A loss that is no scalar, no tensor, or needs no gradient is refused."""
    with pytest.raises(failure.error):
        failure.capture(failure.model())


def refusal(backward: object) -> str:
    with pytest.raises(whence.InvalidLoss) as caught:
        whence.capture(Doing(linear), (X,), backward=backward)  # type: ignore[arg-type]
    return str(caught.value)


def test_loss_that_is_no_scalar_shows_its_shape() -> None:
    """A loss of several numbers says which shape it has and how to reduce it."""
    message = refusal(lambda output: output)
    assert "[2, 4]" in message
    assert "loss.mean()" in message


def test_loss_that_is_no_tensor_shows_its_class() -> None:
    """A loss that is not a tensor says what it is."""
    assert "returned a float" in refusal(lambda output: 1.0)


def test_loss_without_a_gradient_says_what_to_check() -> None:
    """A loss that nothing differentiable leads to says where gradients get lost."""
    assert ".detach()" in refusal(lambda output: output.detach().sum())


def test_bad_loss_names_the_line_of_the_loss() -> None:
    """The error says where the loss function begins."""

    def unreduced(output: torch.Tensor) -> torch.Tensor:
        return output * 2

    message = refusal(unreduced)
    assert "test_backward.py" in message
    assert "<locals>.unreduced" in message


def test_loss_of_one_element_is_a_scalar() -> None:
    """One number in any shape is a loss, as for `Tensor.backward`."""
    model = Doing(linear)
    program = whence.capture(model, (X,), backward=lambda output: output.sum().view(1, 1))
    assert program.verify(model, (X,)).ok


def test_no_differentiable_output() -> None:
    """Tangents for a model whose outputs need no gradient are refused."""
    with pytest.raises(whence.InvalidLoss, match="requires a gradient"):
        whence.capture(Doing(linear).requires_grad_(False), (X,), backward=True)


def test_error_in_the_loss_is_not_blamed_on_a_module() -> None:
    """A value read in the loss function is said to be outside any module."""
    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(
            Doing(linear), (X,), backward=lambda output: output.sum() if output.sum() > 0 else -output.sum()
        )
    assert "in module" not in str(caught.value)


@pytest.mark.parametrize("loss", [True, lambda output: output.to_dense().sum()])
def test_sparse_result_that_requires_a_gradient(loss: object) -> None:
    """Its gradient may come sparse or dense: a joint program refuses it, a forward program takes either."""
    x = torch.rand(2, 4, requires_grad=True)
    with pytest.raises(whence.errors.UnsupportedInput, match="returns a sparse_coo tensor"):
        whence.capture(torch.Tensor.to_sparse, (x,), backward=loss)  # type: ignore[arg-type]
    assert whence.capture(torch.Tensor.to_sparse, (x,)).verify(torch.Tensor.to_sparse, (x,)).ok


class Remembering(nn.Linear):
    """Computes something once, and keeps it with its history until it is told otherwise."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = super().forward(torch.ones(2, 4)).exp()
        return x * self.kept + self.bias


@pytest.mark.parametrize("takes_step", [False, True])
def test_a_backward_does_not_go_on_through_an_earlier_call(takes_step: bool) -> None:
    """It would free that for eager, which goes on as if nothing had been captured."""
    model, x = Remembering(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    model(x)
    with pytest.raises(whence.UnsupportedInput, match="kept, which an earlier call has made"):
        if takes_step:
            whence.capture_step(step, (x,), model=model, optimizer=optimizer, decide="example")
        else:
            whence.capture(model, (x,), backward=True)
    model(x).sum().backward()
    assert model.weight.grad is not None
    model.kept = model.kept.detach() if model.kept is not None else None
    assert whence.capture(model, (x,), backward=True).verify(model, (x,)).ok

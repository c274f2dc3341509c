import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import whence
from tests.tracing.failing import DATA_DEPENDENT, Doing, Failure
from whence.program.node_records import origin_of

X = torch.ones(2, 4)


def stopped(model: Any, *args: Any, **options: Any) -> whence.CaptureError:
    """The error that stops a capture while it records."""
    with pytest.raises(whence.CaptureError) as caught:
        whence.capture(model, args or (X,), **options)
    return caught.value


def page(error: whence.CaptureError) -> str:
    """What had been recorded, without the line of this file."""
    return "\n".join(line.split(", at ")[0] for line in str(error.partial).splitlines())


class Gate(nn.Module):
    """Asks for a value after some work."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.score(hidden).sum() > 0 else self.unused(hidden)


def test_partial_program_as_text() -> None:
    """It prints as a program does: the inputs used so far, operations under their calls, and the end."""
    assert_expected_inline(
        page(stopped(nn.Sequential(nn.ReLU(), Gate()))),
        """\
program Sequential, as far as it was recorded
  in   input: f32[2, 4]
  in   p_1_score_weight: f32[1, 4]
  in   p_1_score_bias: f32[1]

forward  0
  relu: f32[2, 4] = aten.relu.default(input)

forward  1.score
  linear: f32[2, 1] = aten.linear.default(relu, p_1_score_weight, p_1_score_bias)

forward  1
  sum_1: f32[] = aten.sum.default(linear)
  gt: bool[] = aten.gt.Scalar(sum_1, 0)

<- stopped here: a branch (if, while, and, or, bool()) needs the value of gt, which a capture does not have
   in module 1""",
    )


def test_message_says_that_there_is_a_partial_program() -> None:
    """The error tells how to see what was recorded, and its end names the line."""
    error = stopped(Gate())
    assert "  recorded until then: print(error.partial)" in str(error).splitlines()
    assert "test_partial.py" in str(error.partial).splitlines()[-1]


class Doubled(torch.autograd.Function):
    """Asks for a value in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] if x.sum().item() > 0 else -gradients[0]


def test_nodes_of_a_half_recorded_backward_claim_no_module() -> None:
    """Which module a backward node belongs to is worked out at the end: until then it is not known."""
    error = stopped(Doing(lambda m, x: Doubled.apply(m.linear(x))), backward=lambda output: output.sum())
    assert "a number (.item(), int(), if, while) needs the value of sum_2" in error.what
    shown = str(error.partial).splitlines()
    assert "forward  linear" in shown
    assert shown.index("backward  module not known") > shown.index("forward  linear")
    graph: fx.Graph = error.partial.graph  # type: ignore[union-attr]
    backward = [node for node in graph.nodes if origin_of(node).phase == "backward"]
    assert backward and all(origin_of(node).quality == "none" for node in backward)


def unfold(m: Doing, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.unfold(1, 2, 2).mul_(2)
    return hidden


def seeded(m: Doing, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.linear(x)


def nested(m: Doing, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    whence.capture(nn.ReLU(), (hidden,))
    return hidden


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (unfold, whence.UnsupportedMutation),
        (seeded, whence.SideEffect),
        (nested, whence.NestedCapture),
        (lambda m, x: {m.linear(x)}, whence.UnsupportedInput),
        (lambda m, x: m.linear(x).detach(), whence.InvalidLoss),
    ],
    ids=["written", "on the side", "nested", "result", "no gradient"],
)
def test_every_error_of_a_recording_carries_it(body: Callable[..., Any], error: type[Exception]) -> None:
    """Whenever in the recording it stops, and also when it is refused afterwards."""
    found = stopped(Doing(body), backward=True)
    assert type(found) is error
    assert "aten.addmm.default(p_linear_bias, x, t)" in str(found.partial)
    assert found.what in str(found.partial)


@pytest.mark.sample(5)
@pytest.mark.parametrize("failure", DATA_DEPENDENT, ids=lambda failure: failure.name)
def test_operation_that_failed_is_not_among_the_recorded(failure: Failure) -> None:
    """The partial program ends with the last operation that has a result."""
    with pytest.raises(whence.DataDependent) as caught:
        failure.capture(failure.model())
    assert "_local_scalar_dense" not in str(caught.value.partial)


@pytest.mark.parametrize("model", [3, nn.Linear, nn.Bilinear(4, 4, 4)], ids=["number", "class", "inputs"])
def test_error_before_the_recording_has_none(model: Any) -> None:
    """What is found before the model runs has nothing to show, and does not speak of it."""
    error = stopped(model)
    assert error.partial is None
    assert "recorded until then" not in str(error)


def test_error_of_a_nested_capture_has_the_place_in_the_outer_one() -> None:
    """The line that started the inner capture is named, and the module around it."""
    error = stopped(nn.Sequential(Doing(nested)))
    assert error.where.module == "0"
    assert error.where.line is not None and "in nested" in error.where.line


def test_error_leaves_its_partial_program_behind_when_it_travels() -> None:
    """An error from a worker process comes without the graph, and says the rest."""
    error = stopped(Gate())
    again = pickle.loads(pickle.dumps(error))
    assert again.partial is None
    assert (again.what, again.where, again.why, again.remedy) == (
        *(error.what, error.where),
        *(error.why, error.remedy),
    )


def test_partial_program_leaves_a_failed_capture_s_model_alone() -> None:
    """An error that is kept keeps nothing of the model from being captured again."""
    model = Gate()
    error = stopped(model)
    assert whence.capture(model.score, (X,)).verify(model.score, (X,)).ok
    assert error.partial is not None

"""Modes that a model asked for: a call in another one is refused, with the module and the line."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn
from torch.overrides import has_torch_function

import whence
from whence.errors import CallError, DataDependent, UnsupportedOperator, UsageError

X = torch.randn(2, 5, 16)
PADDED = torch.arange(5) > torch.tensor([[4], [2]])
"""A mask that leaves out the ends of rows."""


class Inner(nn.Module):
    """Asks by names of this file."""

    def forward(self, x: Tensor) -> Tensor:
        if has_torch_function((x,)):
            return x
        return x.sin() if is_grad_enabled() else x.cos()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.inner(x)
        return value + 1


class InOwnMode(Inner):
    """Sets the mode itself before it asks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval()


def test_another_mode_is_refused() -> None:
    """Module and line are named, and the guard is that of the line, too."""
    program = whence.capture(Outer(), (X,))
    for run in (program.module(), program.unflatten()):
        with (
            torch.no_grad(),
            pytest.raises(CallError, match="grad mode was on at capture, and is off") as met,
        ):
            run(X)
        assert re.search(
            r"in module inner, at .*test_fitting_asked_modes.py:\d+ in Inner.forward", str(met.value)
        )
    with torch.no_grad():
        (violation,) = program.check(Outer())
    assert violation.guard.what == "grad mode"
    assert "Inner.forward" in str(violation.guard.source)


class OfHistory(nn.Module):
    """Asks a value whether it has a history, or was made in inference mode."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(16, 16), asks

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.linear(x)
        return value.sin() if self.asks(value) else value.cos()


@pytest.mark.parametrize(
    "asks",
    [lambda y: y.requires_grad, lambda y: y.is_leaf, lambda y: y.is_inference()],
    ids=["requires_grad", "is_leaf", "is_inference"],
)
def test_a_question_to_a_value_is_one_about_the_mode(asks: Callable[[Tensor], bool]) -> None:
    """Whoever traces functions, or has that put aside, must not stand between who asks and the answer."""
    program = whence.capture(OfHistory(asks), (X,))
    with torch.inference_mode(), pytest.raises(CallError, match="mode was o"):
        program.module()(X)


def test_a_mode_that_the_model_sets_is_none_of_the_callers() -> None:
    """What it computes there it computes in every run."""
    program = whence.capture(InOwnMode(), (X,))
    assert program.circumstances.modes == ()
    with torch.no_grad():
        assert program.verify(InOwnMode(), (X,)).ok


def test_a_guarded_program_is_captured_again_in_another_mode() -> None:
    """And is eager's in each."""
    model = encoder()
    guarded = whence.capture(model, (X,)).guarded(model, on_violation="recapture")
    modes: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.enable_grad]
    for mode in (*modes, torch.inference_mode, *modes):
        with mode():
            assert torch.equal(guarded(X), model(X))


def test_a_file_keeps_what_was_asked(tmp_path: Any) -> None:
    """A loaded program refuses as the saved one does."""
    whence.capture(Outer(), (X,)).save(tmp_path / "program")
    loaded = whence.load(tmp_path / "program")
    with torch.no_grad(), pytest.raises(CallError, match="grad mode was on"):
        loaded.module()(X)


def test_compiled_it_is_refused_too() -> None:
    """A compiled module looks at the mode as the module does."""
    torch._dynamo.reset()
    program = whence.capture(Outer(), (X,))
    compiled = torch.compile(program.module(), backend="eager")
    assert torch.equal(compiled(X), Outer()(X))
    with torch.no_grad(), pytest.raises(CallError, match="grad mode was on"):
        compiled(X)


@pytest.mark.parametrize("size", [0, 1])
def test_without_gradients_encoders_are_one_operator_a_layer(size: int) -> None:
    """As eager runs them; with sizes that may vary, too."""
    model = encoder()
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},) if size else None
    with torch.no_grad():
        program = whence.capture(model, (X,), dynamic_shapes=shapes)
        assert program.verify(model, (X[:, : 5 - size],)).ok
    assert len(program.select("layers.* :: aten._transformer_encoder_layer_fwd")) == 2


def test_frozen_encoders_are_one_operator_a_layer_in_a_joint_program() -> None:
    """Their head trains."""
    model = nn.Sequential(encoder().requires_grad_(False), nn.Linear(16, 2))
    program = whence.capture(model, (X,), backward=lambda y: y.sin().sum())
    assert program.verify(model, (X,)).ok
    assert len(program.select("0.layers.* :: aten._transformer_encoder_layer_fwd")) == 2


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_question_whose_answer_changes_nothing(captured: bool, trained: bool) -> None:
    """Frozen encoders take one path in both modes, and so do their programs, and a head that trains."""
    model = nn.Sequential(encoder().requires_grad_(False), nn.Linear(16, 2).requires_grad_(trained))
    with torch.set_grad_enabled(captured):
        program = whence.capture(model, (X,))
    assert program.circumstances.modes == ()
    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            assert torch.equal(program.unflatten()(X), model(X))
            if not trained:
                assert torch.equal(program.guarded(model)(X), model(X))
                assert program.check(model, (X,)) == []


def test_a_leaf_that_the_model_makes_asks_for_the_mode() -> None:
    """Nothing that comes in requires gradients, and the mode decides all the same."""

    def of_a_leaf(x: Tensor) -> Tensor:
        y = torch.ones(16, requires_grad=True) * x
        return y.sin() if y.requires_grad else y.cos()

    program = whence.capture(of_a_leaf, (X,))
    with torch.no_grad(), pytest.raises(CallError, match="grad mode was on"):
        program.module()(X)


def test_a_nested_tensor_is_refused() -> None:
    """Where eager makes one, because no gradients are recorded; and is none where they are."""
    model, masked = encoder(), {"src_key_padding_mask": PADDED}
    with torch.no_grad(), pytest.raises(DataDependent, match="the values of a mask decide its sizes") as met:
        whence.capture(model, (X,), masked)
    assert "enable_nested_tensor=False" in str(met.value)
    program = whence.capture(model, (X,), masked)
    assert program.verify(model, (X,), masked).ok
    with torch.no_grad(), pytest.raises(CallError, match="grad mode was on"):
        program.module()(X, **masked)


def test_a_mask_that_decides_against_it_is_a_decision() -> None:
    """With the values of the example; a mask that decides for it is stale."""
    model, masked = encoder(), {"src_key_padding_mask": PADDED.flip(1)}
    with torch.no_grad():
        program = whence.capture(model, (X,), masked, decide="example")
        assert program.verify(model, (X,), masked).ok
        with pytest.raises(whence.StaleCapture, match="a branch goes another way"):
            program.module()(X, src_key_padding_mask=PADDED)


def test_casts_inside_of_an_operator_are_refused() -> None:
    """A program runs without autocast, and has no operations for them."""
    for model, args in ((encoder(), (X,)), (nn.Bilinear(16, 16, 2).eval(), (X, X))):
        with torch.no_grad(), torch.autocast("cpu"), pytest.raises(UnsupportedOperator, match="casts inside"):
            whence.capture(model, args)


def test_the_switch_of_the_fast_path_is_a_guard() -> None:
    """Turned off, encoders compute in other steps."""
    model = encoder()
    with torch.no_grad():
        program = whence.capture(model, (X,))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert [row.guard.what for row in program.check(model)] == ["fast path of encoders"]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("backward", [True, lambda y: y.sum()])
def test_a_backward_in_inference_mode_is_refused(backward: Any) -> None:
    """Eager has none."""
    with torch.inference_mode(), pytest.raises(UsageError, match=r"inference_mode\(\) is on"):
        whence.capture(nn.Linear(16, 2), (X,), backward=backward)


def test_a_step_in_inference_mode_is_refused() -> None:
    """So is a whole step."""
    model = nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with torch.inference_mode(), pytest.raises(UsageError, match=r"inference_mode\(\) is on"):
        whence.capture_step(step, (X,), model=model, optimizer=optimizer)


def test_a_loss_is_verified_with_gradients() -> None:
    """Without, eager has no backward to compare with."""
    model = nn.Linear(16, 2)
    program = whence.capture(model, (X,), backward=lambda y: y.sum())
    with torch.no_grad(), pytest.raises(UsageError, match="has a loss, and gradients are off"):
        program.verify(model, (X,))


def test_models_and_inputs_that_were_made_in_inference_mode() -> None:
    """Wherever eager runs on them, so does the program, and state is written as eager writes it."""
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(5), nn.Dropout(0.5)), torch.randn(2, 5, 16)
        program = whence.capture(model, (x,))
        assert program.verify(model, (x,)).ok
        assert whence.capture(model.eval(), (x,)).verify(model, (x,)).ok
    with torch.no_grad():
        assert whence.capture(model, (x,)).verify(model, (x,)).ok


def test_a_capture_in_inference_mode_is_one_without_gradients() -> None:
    """Operation by operation."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Flatten())
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = whence.capture(model, (image,))
    with torch.inference_mode():
        found = whence.capture(model, (image,))
    assert [str(node.target) for node in found.nodes()] == [str(node.target) for node in expected.nodes()]

"""A program that looks before it runs."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.checks import same_bits
from tests.guards.changes import inputs_of, make


def _mean(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits.sin().mean()


def test_runs_the_program_while_guards_hold() -> None:
    """What the guarded program returns is what the model returns."""
    model, (args, _) = make("llama"), inputs_of("llama")
    guarded = whence.capture(model, args).guarded(model)
    assert same_bits(guarded(*args).logits, model(*args).logits)


def test_raises_with_everything_that_changed() -> None:
    """All that does not hold is in the error, as text and as data."""
    model, (args, _) = make("llama"), inputs_of("llama")
    guarded = whence.capture(model, args).guarded(model)
    model.eval()
    model.get_submodule("model.norm").variance_epsilon = 0.5  # type: ignore[assignment]
    model.get_submodule("lm_head").train()
    with pytest.raises(whence.StaleCapture) as caught:
        guarded(*args)
    changed = [violation.guard.what for violation in caught.value.violations]  # type: ignore[attr-defined]
    assert changed == ["model.norm.variance_epsilon", "lm_head.training"]
    assert all(text in str(caught.value) for text in changed)


class Factor:
    """A number."""

    def __init__(self, value: float) -> None:
        self.value = value


class Scaled(nn.Module):
    """Multiplies by numbers of objects: one that it holds, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.factors, self.names = Factor(2.0), [Factor(3.0)], {"a"}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.value * self.factors[0].value * len(self.names)


@pytest.mark.parametrize("in_list", [False, True])
def test_what_a_check_remembers_is_what_the_model_holds(in_list: bool) -> None:
    """An object that is held no longer may change; one that is held now may not."""
    model, x, first, second = Scaled(), torch.ones(2), Factor(2.0), Factor(2.0)

    def hold(factor: Factor) -> None:
        if in_list:
            model.factors[0] = factor
        else:
            model.factor = factor

    hold(first)
    guarded = whence.capture(model, (x,)).guarded(model)
    guarded(x)
    hold(second)
    guarded(x)
    first.value = 5.0
    assert same_bits(guarded(x), model(x))
    second.value = 7.0
    with pytest.raises(whence.StaleCapture, match=r"\.value"):
        guarded(x)
    second.value = 2.0
    assert same_bits(guarded(x), model(x))


def test_what_changes_in_itself_is_compared_in_every_check() -> None:
    """A set that is the same object and holds more."""
    model, x = Scaled(), torch.ones(2)
    guarded = whence.capture(model, (x,)).guarded(model)
    guarded(x)
    model.names.add("b")
    with pytest.raises(whence.StaleCapture, match="names"):
        guarded(x)


def test_raises_for_inputs_of_another_shape() -> None:
    """Inputs are guarded as the model is."""
    model, (args, _) = make("llama"), inputs_of("llama")
    guarded = whence.capture(model, args).guarded(model)
    with pytest.raises(whence.StaleCapture, match=r"args\[0\]"):
        guarded(torch.ones(3, 6, dtype=torch.int64))


def test_looks_without_a_run() -> None:
    """What a call would find, whatever an earlier look remembers."""
    model, (args, _) = make("llama"), inputs_of("llama")
    program = whence.capture(model, args)
    guarded = program.guarded(model)
    assert guarded.check(args) == guarded.check(args) == []
    model.get_submodule("model.norm").variance_epsilon = 0.5  # type: ignore[assignment]
    found = guarded.check(args)
    assert found
    assert found == program.check(model, args)


def test_warns_and_runs_the_model_itself() -> None:
    """With `warn` the numbers are those of the changed model."""
    model, (args, _) = make("llama"), inputs_of("llama")
    guarded = whence.capture(model, args).guarded(model, on_violation="warn")
    model.get_submodule("model.norm").variance_epsilon = 0.5  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="variance_epsilon"):
        result = guarded(*args)
    assert same_bits(result.logits, model(*args).logits)


def test_warning_gives_the_loss_where_the_program_does() -> None:
    """Both ways return the same kind of value."""
    model, (args, _) = make("llama"), inputs_of("llama")
    guarded = whence.capture(model, args, backward=_mean).guarded(model, on_violation="warn")
    loss, _ = guarded(*args)
    model.get_submodule("model.norm").variance_epsilon = 0.5  # type: ignore[assignment]
    with pytest.warns(UserWarning):
        other, outputs = guarded(*args)
    assert not same_bits(other, loss)
    assert same_bits(other, _mean(outputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("backward", [False, True, _mean])
@pytest.mark.parametrize("state", ["inputs", "attributes"])
def test_captures_again_as_before(backward: Any, state: str) -> None:
    """With `recapture` the new program has the old one's backward and state, and its guards hold."""
    model, (args, _) = make("llama"), inputs_of("llama")
    program = whence.capture(model, args, backward=backward, state=state)
    guarded = program.guarded(model, on_violation="recapture")
    guarded(*args)
    assert guarded.program is program
    model.get_submodule("model.norm").variance_epsilon = 0.5  # type: ignore[assignment]
    guarded(*args)
    again = guarded.program
    assert isinstance(again, whence.Program)
    assert again is not program
    assert again.has_backward == program.has_backward
    assert again.loss_function is program.loss_function
    assert bool(again.signature.attributes) == bool(program.signature.attributes)
    assert again.check(model, args) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(*args)
    assert guarded.program is again


def test_recapture_for_inputs_of_another_shape() -> None:
    """A new shape is a new capture."""
    model = make("llama")
    args, _ = inputs_of("llama")
    guarded = whence.capture(model, args).guarded(model, on_violation="recapture")
    longer = torch.arange(16).reshape(2, 8)
    assert same_bits(guarded(longer).logits, model(longer).logits)


def test_replaced_parameters_are_the_ones_used() -> None:
    """A parameter replaced by its like breaks no guard: the program runs on the new one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    guarded = whence.capture(model, (x,)).guarded(model)
    assert same_bits(guarded(x), model(x))
    model[0].weight = nn.Parameter(torch.randn(4, 4))
    assert same_bits(guarded(x), model(x))
    model[0] = nn.Linear(4, 4)
    assert same_bits(guarded(x), model(x))


def test_guarded_on_another_instance() -> None:
    """The program runs on the state of the model it is guarded for."""
    x = torch.randn(2, 4)
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert same_bits(whence.capture(model, (x,)).guarded(other)(x), other(x))


def test_gradients_reach_the_model() -> None:
    """Training through the guarded program trains the model."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    guarded = whence.capture(model, (x,), backward=True).guarded(model)
    guarded(x).sin().sum().backward()
    assert model.weight.grad is not None
    got = model.weight.grad.clone()
    model.zero_grad()
    model(x).sin().sum().backward()
    assert same_bits(got, model.weight.grad)


def test_a_mode_that_changed_everywhere_is_one_change() -> None:
    """`model.train()` is told of once; a part that was set otherwise is told of by itself."""
    model = make("llama")
    args, _ = inputs_of("llama")
    program = whence.capture(model, args)
    model.train()
    assert [violation.guard.what for violation in program.check(model)] == ["training"]
    model.eval()
    model.get_submodule("model.layers").train()
    changed = [violation.guard.what for violation in program.check(model)]
    assert changed == ["model.layers.0.training", "model.layers.1.training"]


def test_unknown_way_is_refused() -> None:
    """`on_violation` is one of three words."""
    program = whence.capture(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(whence.UsageError, match="raise"):
        program.guarded(nn.Linear(2, 2), on_violation="ignore")


def test_recapture_keeps_what_was_asked_for() -> None:
    """A capture again has the open sizes and calling conventions of the first, where the sizes fit."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0)), torch.randn(3, 4)
    rows = torch.export.Dim("rows", max=8)
    program = whence.capture(model, (x,), dynamic_shapes=({0: rows},), preserve_calls="0")
    guarded = program.guarded(model, "recapture")
    model.eval()
    assert torch.equal(guarded(x), model(x))
    assert guarded.program is not program
    assert guarded.program.calls.preserved == program.calls.preserved != frozenset()
    again = guarded.program
    assert torch.equal(guarded(torch.ones(5, 4)), model(torch.ones(5, 4)))
    assert guarded.program is again
    assert torch.equal(guarded(torch.ones(20, 4)), model(torch.ones(20, 4)))
    assert guarded.program.calls.preserved == program.calls.preserved
    assert guarded.program.circumstances.dynamic_shapes is None


def exported_layer(rows: Dim | None = None) -> tuple[nn.Module, whence.Program]:
    layer = nn.Linear(4, 2)
    shapes = None if rows is None else ({0: rows},)
    return layer, whence.from_exported_program(
        torch.export.export(layer, (torch.ones(3, 4),), dynamic_shapes=shapes)
    )


def test_a_program_without_guards_says_so() -> None:
    """Of an exported graph nobody knows what it assumes of a model: without arguments there is no answer."""
    layer, program = exported_layer()
    with pytest.raises(whence.UsageError, match="has no guards"):
        program.check(layer)
    with pytest.raises(whence.UsageError, match="has no guards"):
        program.guarded(layer)(torch.ones(3, 4))


def test_inputs_of_a_program_without_guards() -> None:
    """What a call would refuse is told in words, and what it takes is no violation, whatever else it is."""
    layer, program = exported_layer()
    assert program.check(layer, (torch.ones(3, 4),)) == []
    assert program.check(layer, (torch.ones(4, 3).T.requires_grad_(),)) == []
    (violation,) = program.check(layer, (torch.ones(5, 4),))
    words = "`args[0]` was Tensor float32[3, 4] at capture, is Tensor float32[5, 4] now"
    assert (violation.guard.what, violation.change) == ("args[0]", words)
    (violation,) = program.check(layer, (torch.ones(3, 4).double(),))
    assert "float64" in violation.found
    (violation,) = program.check(layer, (), {"x": torch.ones(3, 4), "y": 1})
    assert violation.guard.what == "the arguments"
    (violation,) = program.check(layer, torch.ones(3, 4))  # type: ignore[arg-type]
    assert "args of Tensor" in violation.found


def test_open_sizes_of_a_program_without_guards() -> None:
    """Sizes that the export left open are compared with their ranges."""
    layer, program = exported_layer(Dim("rows", min=2, max=9))
    assert program.check(layer, (torch.ones(7, 4),)) == []
    (violation,) = program.check(layer, (torch.ones(11, 4),))
    assert violation.change == "dim 0 of `args[0]` is 11, and must be at most 9 (the capture)"
    (violation,) = program.check(layer, (torch.ones(7, 5),))
    assert violation.guard.what == "args[0]" and violation.found == "Tensor float32[7, 5]"
    assert [row.guard.what for row in program.check(layer, (torch.ones(4),))] == ["args[0]"]


def test_other_arguments_of_a_program_without_guards() -> None:
    """Memory that a program reads, numbers and constants."""

    class Reads(nn.Module):
        def forward(self, x: Tensor, rows: int) -> Tensor:
            return x.as_strided((2, 2), (1, 2)) * rows

    model, x = Reads(), torch.ones(2, 4)
    program = whence.from_exported_program(
        torch.export.export(model, (x, 3), dynamic_shapes=({}, Dim.DYNAMIC))
    )
    assert program.check(model, (x, 5)) == []
    (violation,) = program.check(model, (torch.ones(4, 2).T, 5))
    assert violation.guard.what == "args[0]" and "strides" in violation.found
    (violation,) = program.check(model, (x, "5"))
    assert violation.guard.what == "args[1]"
    strict = whence.capture(model, (x, 3), strict=True)
    assert [row.guard.what for row in strict.check(model, (x, 4))] == ["args[1]"]

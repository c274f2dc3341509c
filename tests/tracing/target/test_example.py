from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.releases import SCRIPT_IS_DEPRECATED
from tests.tracing.failing import BAD_CALLS, Box, Doing, Failure, linear

X = torch.ones(2, 4)


def refusal(model: Any, *args: Any, **options: Any) -> whence.CaptureError:
    """The error with which a capture is refused."""
    with pytest.raises(whence.CaptureError) as caught:
        whence.capture(model, *args, **options)
    return caught.value


@pytest.mark.parametrize("failure", BAD_CALLS, ids=lambda failure: failure.name)
def test_bad_call_raises_its_own_kind(failure: Failure) -> None:
    """Each kind of wrong model or input has an error class of its own."""
    with pytest.raises(failure.error):
        failure.capture(failure.model())


def test_script_module() -> None:
    """TorchScript is refused by name, and the remedy is the module it came from."""
    with pytest.warns(SCRIPT_IS_DEPRECATED):
        scripted = torch.jit.trace(nn.Linear(4, 4), X)
    error = refusal(scripted, (X,))
    assert isinstance(error, whence.NotCallable)
    assert "capture the module it was scripted from" in str(error)


def test_class_instead_of_an_instance() -> None:
    """A class of modules given for a module is named as such."""
    error = refusal(nn.Linear, (X,))
    assert isinstance(error, whence.NotCallable)


def test_not_callable_says_what_to_pass() -> None:
    """Something that cannot be called is named by its class, with examples of what can."""
    error = refusal("model", (X,))
    assert "got str" in str(error)
    assert "a function, or a bound method" in error.remedy


def test_single_tensor_for_args() -> None:
    """A bare tensor for `args` is the commonest slip, and the remedy shows the comma."""
    error = refusal(nn.Linear(4, 4), X)
    assert "got Tensor" in str(error)
    assert "(x,)" in error.remedy


def test_wrong_inputs_show_the_signature() -> None:
    """Inputs that do not bind say what Python says, and what the model takes."""
    error = refusal(nn.Bilinear(4, 4, 4), (X,))
    assert "missing a required argument: 'input2'" in error.what
    assert error.why == "it takes (input1, input2)"


def test_unregistered_input_is_found_where_it_is() -> None:
    """An object inside a structure is named by its access and class, with how to register it."""
    error = refusal(Doing(linear), ({"inner": [X, Box(X)]},))
    assert "args[0]['inner'][1] is a Box" in error.what
    assert "register_dataclass" in error.remedy


def test_every_unregistered_input_is_named() -> None:
    """Two objects that cannot be inputs are reported at once."""
    error = refusal(nn.Bilinear(4, 4, 4), (Box(X), {X}))
    assert "args[0] is a Box" in error.what
    assert "args[1] is a set" in error.what


def test_unregistered_output_names_the_model() -> None:
    """A returned object that cannot be described names the model and the class."""
    error = refusal(Doing(lambda m, x: {"result": Box(m.linear(x))}), (X,))
    assert "Doing returned a Box" in error.what
    assert error.where.line is not None and error.where.line.endswith("in Doing.forward")


def test_wrapper_subclass_input() -> None:
    """A tensor made of other tensors is refused as an input, not misread."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert isinstance(refusal(Doing(linear), (nested,)), whence.UnsupportedInput)


def test_unknown_backward() -> None:
    """`backward` is a truth value or a function; anything else is refused, not taken for true."""
    with pytest.raises(whence.WhenceError):
        whence.capture(Doing(linear), (X,), backward="loss")  # type: ignore[arg-type]


def test_unknown_state() -> None:
    """A view of the state that does not exist is refused."""
    with pytest.raises(whence.UsageError):
        whence.capture(Doing(linear), (X,), state="weights")


def test_error_has_parts() -> None:
    """Code, what, where, why and what to do are attributes of the error, and lines of its text."""
    error = refusal(nn.Bilinear(4, 4, 4), (X,))
    assert str(error).splitlines() == [
        f"[WH103] {error.what}",
        f"  why: {error.why}",
        f"  what to do: {error.remedy}",
        "  more: docs/errors/WH103.md in whence's repository",
    ]


class Untouched(nn.Module):
    """Has lazy modules inside that have not seen a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


def test_uninitialized_parameters() -> None:
    """Lazy modules that the model does not call keep parameters without a shape: all are named."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.LazyLinear(4), nn.LazyLinear(4)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    error = refusal(Unused(), (X,))
    assert error.what == "spare.weight, spare.bias are not initialised"
    assert "not used" in error.remedy


def test_all_that_stands_against_a_capture_is_named() -> None:
    """All scripted submodules are reported at once."""
    with pytest.warns(SCRIPT_IS_DEPRECATED):
        scripted = [torch.jit.trace(nn.Linear(4, 4), X) for _ in range(2)]
    error = refusal(nn.Sequential(*scripted), (X,))
    assert "cannot be captured (in module 0)" in error.what
    assert "cannot be captured (in module 1)" in error.what
    assert "it was scripted from" in error.remedy


def test_wrong_args_and_kwargs_are_named_together() -> None:
    """Neither a tuple nor a dict: both are said."""
    error = refusal(nn.Linear(4, 4), [X], [X])
    assert "got list" in error.what
    assert error.what.count("expected `") == 2


def test_every_argument_that_does_not_fit_is_named() -> None:
    """What is missing and what is unknown is said at once."""
    error = refusal(nn.Bilinear(4, 4, 4), (), {"input": X})
    assert "missing a required argument: 'input1'" in error.what
    assert "missing a required argument: 'input2'" in error.what
    assert "unexpected keyword argument 'input'" in error.what


def test_unregistered_output_of_a_class_of_torch_names_no_line() -> None:
    """A line inside torch says nothing: only the module is named."""
    error = refusal(nn.Sequential(Doing(lambda m, x: {x})), (X,))
    assert (error.where.module, error.where.line) == ("", None)


def test_every_unregistered_result_is_named() -> None:
    """Results of two classes that cannot be described are named in one error."""
    error = refusal(Doing(lambda m, x: (Box(m.linear(x)), {x}, x)), (X,))
    assert "Doing returned a Box and a set" in error.what


def test_wrapper_subclass_beside_an_unregistered_input() -> None:
    """Two inputs that are refused for different reasons have a remedy each."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    error = refusal(nn.Bilinear(4, 4, 4), (nested, Box(X)))
    assert "args[0] is a NestedTensor; args[1] is a Box" in error.what
    assert "padded" in error.remedy and "register" in error.remedy


def test_every_unknown_option_is_named() -> None:
    """Two options that do not exist are said at once, before the model runs."""
    with pytest.raises(whence.UsageError) as caught:
        whence.capture(Doing(linear), (X,), backward="loss", state="weights")  # type: ignore[arg-type]
    assert caught.value.what == "backward cannot be 'loss'; state cannot be 'weights'"

"""A capture, whether it succeeds or fails, leaves the model and everything around it as it was."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import backward_of, leaves_no_trace
from tests.models import MODEL_CASES, MODES, ModelCase, sampled_cases
from tests.tracing.failing import ALL, Failing, Failure

SOME = {
    "gpt2_dropout",
    "llama_checkpoint",
    "mixtral",
    "t5",
    "resnet",
    "spectral_norm",
    "momentum_teacher",
    "weight_norm",
}
SOME |= {row.name for row in MODEL_CASES if "hf" not in row.tags}
CASES = [row for row in MODEL_CASES if row.name in SOME]
X = torch.ones(2, 4)


@pytest.mark.sample(11)
@pytest.mark.parametrize("failure", ALL, ids=lambda failure: failure.name)
def test_failed_capture_leaves_no_trace(failure: Failure) -> None:
    """After each kind of failure the model, its hooks, seeds, modes and patches are as before."""
    model = failure.model()
    modules = [model] if isinstance(model, nn.Module) else []
    with leaves_no_trace(*modules), suppress(BaseException):
        failure.capture(model)


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", sampled_cases(CASES))
def test_capture_leaves_no_trace(row: ModelCase, mode: str) -> None:
    """After a capture the model's tensors, hooks and attributes, seeds, modes and patches are as before."""
    model, args, kwargs = row.make()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with leaves_no_trace(model):
        whence.capture(model, args, kwargs, backward=backward_of(row, mode))


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", sampled_cases(row for row in CASES if "hf" not in row.tags))
def test_capture_leaves_inputs_alone(row: ModelCase, mode: str) -> None:
    """The example inputs keep their values, versions and gradients."""
    model, args, kwargs = row.make()
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    before = [(t.clone(), t._version, t.requires_grad, t.grad) for t in tensors]
    whence.capture(model, args, kwargs, backward=backward_of(row, mode))
    for tensor, (value, version, required, gradient) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert (tensor._version, tensor.requires_grad, tensor.grad) == (version, required, gradient)


@pytest.mark.sample(6)
@pytest.mark.parametrize("row", sampled_cases(row for row in CASES if "hf" not in row.tags))
def test_verify_leaves_values_alone(row: ModelCase) -> None:
    """Verifying gives every tensor, gradient and seed of the model back."""
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs, backward=row.loss)
    before = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    generator = torch.get_rng_state()
    program.verify(model, args, kwargs)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, before[name])
        assert tensor.grad is None
    assert torch.equal(torch.get_rng_state(), generator)


class Changing(nn.Module):
    """Changes itself in a way that the body chooses."""

    table: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.history: list[Any] = []
        self.calls = 0
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        self.body(self, x)
        return self.linear(x) + self.table


def count(m: Changing, x: Tensor) -> None:
    m.calls += 1


def assign_a_buffer(m: Changing, x: Tensor) -> None:
    m.table = m.table + 1


def add_a_buffer(m: Changing, x: Tensor) -> None:
    m.register_buffer("extra", torch.zeros(4))


def add_a_parameter(m: Changing, x: Tensor) -> None:
    m.extra = nn.Parameter(torch.zeros(4))


def add_a_module(m: Changing, x: Tensor) -> None:
    m.extra = nn.Linear(4, 4)


def delete_a_buffer(m: Changing, x: Tensor) -> None:
    del m._buffers["table"]
    m.table = torch.zeros(4)


def add_a_hook(m: Changing, x: Tensor) -> None:
    m.linear.register_forward_hook(lambda module, args, output: None)


def change_the_mode(m: Changing, x: Tensor) -> None:
    m.train(not m.training)


def require_a_gradient_of_a_buffer(m: Changing, x: Tensor) -> None:
    m.table.requires_grad_()


def freeze_a_parameter(m: Changing, x: Tensor) -> None:
    m.linear.weight.requires_grad_(False)


def clear_a_gradient(m: Changing, x: Tensor) -> None:
    m.linear.weight.grad = None


def write_through_data(m: Changing, x: Tensor) -> None:
    m.table.data += 1


def run_backward(m: Changing, x: Tensor) -> None:
    m.linear(x).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        count,
        assign_a_buffer,
        add_a_buffer,
        add_a_parameter,
        add_a_module,
        delete_a_buffer,
        add_a_hook,
        change_the_mode,
        require_a_gradient_of_a_buffer,
        freeze_a_parameter,
        clear_a_gradient,
        write_through_data,
        run_backward,
    ],
    ids=lambda body: body.__name__,
)
def test_what_a_forward_changes_is_changed_back(body: Callable[[Any, Tensor], Any]) -> None:
    """Whatever the model does to itself while it runs on fake tensors is undone, or refused."""
    model = Changing(body)
    model.linear.weight.grad = torch.ones(4, 4)
    with leaves_no_trace(model), suppress(whence.CaptureError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whence.capture(model, (X,))


def test_python_list_of_the_model_holds_no_fake_tensors() -> None:
    """A list that a forward appends to does not keep fake tensors after the capture."""
    model = Changing(lambda m, x: m.history.append(m.linear(x)))
    with suppress(whence.CaptureError), pytest.warns(UserWarning, match="history"):
        whence.capture(model, (X,))
    assert model.history == []


def test_attribute_assigned_in_forward_is_warned_about() -> None:
    """A tensor that a forward leaves in an attribute is gone after the capture, and a warning says so."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    model = Remembering()
    with pytest.warns(UserWarning, match="last"):
        whence.capture(model, (X,))
    assert model.last is None


@contextmanager
def raising_in_the_middle(model: nn.Module, position: int) -> Iterator[None]:
    """The `position`-th module of the model raises when it has run."""
    module = list(model.modules())[position]

    def fail(*_: Any) -> None:
        raise RuntimeError("half-way")

    handle = module.register_forward_hook(fail)
    yield
    handle.remove()


@pytest.mark.parametrize("position", range(5))
def test_failure_half_way_leaves_no_trace(position: int) -> None:
    """Wherever in the model the error comes from, everything is as before."""
    model, image = zoo.InplaceActivations().train(), torch.randn(2, 3, 8, 8)
    with (
        raising_in_the_middle(model, position),
        leaves_no_trace(model),
        pytest.raises(RuntimeError, match="half-way"),
    ):
        whence.capture(model, (image,), backward=True)


def test_grad_mode_of_the_caller_is_kept() -> None:
    """A capture under `no_grad` leaves it on, and one outside leaves it off."""
    model = nn.Linear(4, 4)
    with torch.no_grad(), leaves_no_trace(model):
        whence.capture(model, (X,), backward=True)
        assert not torch.is_grad_enabled()


def test_parameters_shared_with_a_failing_model_stay() -> None:
    """Two captures of models that share a layer, one failing, leave the layer as it was."""
    failing = Failing()
    other = nn.Sequential(failing.layers[0])
    with leaves_no_trace(failing, other):
        with suppress(Exception):
            whence.capture(failing, (X,))
        whence.capture(other, (X,), backward=True)

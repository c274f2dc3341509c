"""A step for another device: its tensors lie there while it is recorded, and are given back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam, AdamW, NAdam, Optimizer

import whence
from tests.tracing.steps.small import batch, never_zero, small, zero_last
from whence.errors import UnsupportedOperator, UsageError


def everything(model: nn.Module, optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """What a capture must leave as it is: objects, memory, numbers, gradients and state."""
    held = [*model.parameters(), *model.buffers()]
    state = [(key, value) for row in optimizer.state.values() for key, value in row.items()]
    tensors = [*held, *(each.grad for each in held if each.grad is not None)]
    tensors += [value for _, value in state if isinstance(value, Tensor)]
    found: list[tuple[Any, ...]] = [
        (id(each), each.data_ptr(), type(each), each.tolist(), id(each.grad)) for each in tensors
    ]
    keys = (*map(id, optimizer.state), *(key for key, _ in state))
    return [*found, keys, tuple(torch.get_rng_state().tolist())]


def fails(error: type[BaseException]) -> Callable[..., Any]:
    def make(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Any]:
        def step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            raise error

        return step

    return make


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_all_is_given_back(error: type[BaseException] | None, later: bool) -> None:
    """Model, gradients, optimizer and random numbers, whatever ends the capture; eager mode goes on."""
    model, optimizer = small()
    if later:
        never_zero(model, optimizer)(batch())
    step = (zero_last if error is None else fails(error))(model, optimizer)
    before = everything(model, optimizer)
    if error is None:
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    else:
        with pytest.raises(error):
            whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    assert everything(model, optimizer) == before
    zero_last(model, optimizer)(batch())


STATE: dict[str, tuple[Callable[[Any], Optimizer], dict[str, str]]] = {
    "adam": (Adam, {"step": "cpu", "exp_avg": "cuda"}),
    "adam that kernels count for": (lambda held: Adam(held, fused=True), {"step": "cuda", "exp_avg": "cuda"}),
    "nadam": (NAdam, {"step": "cpu", "mu_product": "cpu", "exp_avg": "cuda"}),
    "asgd": (ASGD, {"step": "cuda", "eta": "cuda", "ax": "cuda"}),
    "momentum": (lambda held: SGD(held, 0.1, momentum=0.9), {"momentum_buffer": "cuda"}),
}


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", STATE)
def test_state_lies_where_eager_mode_has_it(name: str, later: bool) -> None:
    """That of the first step, and that which there is already."""
    make, wanted = STATE[name]
    model, _ = small()
    optimizer = make(model.parameters())
    step = zero_last(model, optimizer)
    if later:
        step(batch())
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    for key, device in wanted.items():
        row = program.input(f"optimizer.state['0.weight'][{key!r}]")
        assert row.value.device.type == device, key
        assert program.output(f"new_{row.name}").of == row.name


def test_tensors_from_outside_are_named() -> None:
    """They stay on the CPU, as they would beside a model that was moved."""
    model, optimizer = small()
    target = torch.randn(6, 2)

    def step(x: Tensor) -> None:
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()

    with pytest.raises(UnsupportedOperator, match="in a step, pass a tensor from outside as an argument"):
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")


def test_a_first_step_that_does_not_run_here_is_named() -> None:
    """Momentum begins with the gradient, so that the step is taken once, for real: which this one is not."""
    model, _ = small()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor) -> None:
        (model(x).sum() * torch.ones((), device="cuda")).backward()
        optimizer.step()

    before = everything(model, optimizer)
    if not torch.cuda.is_available():
        with pytest.raises(whence.UnsupportedStep, match="first step makes"):
            whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    assert everything(model, optimizer) == before


def test_gradients_of_before_are_there() -> None:
    """A step that adds to them takes them as inputs."""
    model, optimizer = small()
    model(batch()).sum().backward()
    step = never_zero(model, optimizer)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    assert program.input("0.weight.grad").value.device.type == "cuda"


def test_what_is_written_behind_autograd_is_recorded() -> None:
    """`tensor.data = value` is a new value of the parameter, op for op as on the CPU."""
    found = []
    for device in (None, "cuda"):
        model, optimizer = small()
        optimizer = AdamW(model.parameters(), foreach=True)
        before = zero_last(model, optimizer)

        def step(x: Tensor) -> None:
            before(x)  # noqa: B023
            for held in model.parameters():  # noqa: B023
                held.data = held.data * 0.9

        program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device=device)
        found.append([str(node.target) for node in program.graph.nodes])
    assert found[0] == found[1]


def test_attributes_of_parameters_are_read_and_guarded() -> None:
    """One that is there, and one that is looked for in vain."""
    model, optimizer = small()
    weight: Any = model[0].weight
    weight.scale = 0.5

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        for held in model.parameters():
            if held.grad is not None:
                held.grad.mul_(getattr(held, "scale", 1.0))
        optimizer.step()

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    scales = [node.args[1] for node in program.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert {0.5, 1.0} <= {scale for scale in scales if isinstance(scale, float)}
    assert any("scale 0.5" in str(row) for row in program.guards)
    assert vars(weight) == {"scale": 0.5}


def hooked(model: Any) -> dict[str, Any]:
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return {}


def buffered(model: Any) -> dict[str, Any]:
    model.register_buffer("held", batch())
    return {"args": (model.held,)}


def sparse(model: Any) -> dict[str, Any]:
    model.embedding = nn.Embedding(4, 2, sparse=True)
    model.embedding(torch.tensor([1])).sum().backward()
    return {}


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "a hook": (hooked, "0.weight has gradient hooks"),
    "a buffer as an input": (buffered, "an input is held of the model"),
    "a sparse gradient": (sparse, "the gradient of embedding.weight is no plain dense tensor"),
    "values of the example": (lambda _: {"decide": "example"}, "device does not work with decide='example'"),
    "another device": (lambda _: {"device": "xpu"}, "device cannot be 'xpu'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_there_is_refused(name: str) -> None:
    """With reason and remedy, before anything is exchanged."""
    make, words = REFUSED[name]
    model, optimizer = small()
    options = {"args": (batch(),), "device": "cuda", **make(model)}
    with pytest.raises(UsageError, match=words) as caught:
        whence.capture_step(zero_last(model, optimizer), model=model, optimizer=optimizer, **options)
    assert "what to do" in str(caught.value)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_scalers_of_gradients_are_refused(enabled: bool, hidden: bool) -> None:
    """Those that turned themselves off, too: on the device they would be on."""
    model, optimizer = small()
    scaler: Any = torch.amp.GradScaler("cpu", enabled=enabled)
    around: Any = {"scalers": [scaler]} if hidden else scaler

    def step(x: Tensor) -> None:
        found = around["scalers"][0] if hidden else around
        found.scale(model(x).sum()).backward()
        found.step(optimizer)

    with pytest.raises((UsageError, UnsupportedOperator), match="GradScaler") as caught:
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    assert "turns itself off" in str(caught.value)


def test_a_guard_names_the_device() -> None:
    """Of parameters and buffers: a model that is moved there fits, and this one does not."""
    model, optimizer = small()
    step = zero_last(model, optimizer)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, device="cuda")
    found = [str(row) for row in program.check(model)]
    assert any("`0.weight` was Parameter float32[8, 4], on cuda:0" in words for words in found)
    with pytest.raises(whence.WhenceError, match="on cuda:0"):
        program.bind(model, optimizer)(batch())
    with pytest.raises(UsageError, match=r"program.bind\(model.to\('cuda'\), optimizer\)"):
        program.verify(model, (batch(),))

"""What stands for things that a step replaces refuses who reads them, and nobody finds it afterwards."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence
from tests.tracing.steps.small import batch


def hooked(keep: Callable[[dict[str, Any], Tensor], None]) -> tuple[nn.Module, SGD, dict[str, Any], Any]:
    """A model, an optimizer, what a hook keeps, and a step that reads it."""
    model, kept = nn.Linear(4, 2), dict[str, Any]()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda _module, _args, result: keep(kept, result))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sin().mean() + kept["features"].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, kept, step


def test_what_a_hook_keeps_is_read_in_the_same_step() -> None:
    """Features that a hook puts into a dictionary are there for the loss, and after a bound step."""
    model, optimizer, kept, step = hooked(lambda kept, result: kept.update(features=result))
    with warnings.catch_warnings(action="error"):
        program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert kept == {}
    assert program.output("put_0_kept_features").path == "kept['features']"
    expected = torch.nn.functional.linear(batch(), *[each.detach().clone() for each in model.parameters()])
    program.bind(model, optimizer)(batch())
    assert torch.equal(kept["features"], expected)


def test_none_is_left_after_an_error() -> None:
    """Also where the model looks at the same things as the step does."""

    def reads_first(kept: dict[str, Any], result: Tensor) -> None:
        kept["features"] = result + kept.get("features", 0)

    model, optimizer, kept, step = hooked(reads_first)
    error = None
    try:
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    except whence.errors.WhenceError as found:
        error = found
    assert error is not None
    assert kept == {}

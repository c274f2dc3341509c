"""Numbers and sizes that data decide are open by default, and all other sizes are fixed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.failing import Doing

X = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 0.0, -1.0, 2.0]])
OTHER = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number": lambda m, x: m.linear(x) * x.sum().item(),
    "a number of a parameter": lambda m, x: m.linear(x) * m.linear.bias[0].item(),
    "a list of numbers": lambda m, x: m.linear(x) * x.tolist()[0][0],
    "a whole number": lambda m, x: m.linear(x) * (x > 0).sum().item(),
    "indices": lambda m, x: m.linear(x)[x.sum(1).nonzero()],
    "a mask": lambda m, x: m.linear(x)[x > 0],
    "rows of a mask": lambda m, x: m.linear(x[x.sum(1) > 0]),
    "kinds of numbers": lambda m, x: m.linear(x) * torch.unique(x).sum(),
    "repeats": lambda m, x: m.linear(x).repeat_interleave((x > 0).sum(1), dim=0),
    "a size": lambda m, x: m.linear(x).sum() + torch.ones((x > 0).sum().item()).sum(),  # type: ignore[arg-type]
    "a mask that is filled again": lambda m, x: m.linear(torch.zeros_like(x).masked_scatter(x > 0, x[x > 0])),
}
MODES = [False, True, lambda output: output.sin().sum()]


@pytest.mark.sample(7)
@pytest.mark.parametrize("backward", MODES, ids=["forward", "tangents", "loss"])
@pytest.mark.parametrize("name", CASES)
def test_what_data_decide_is_open(name: str, backward: Any) -> None:
    """Nobody has to ask; the program is eager for other data, flat and as a tree, and its guards hold."""
    model = Doing(CASES[name])
    program = whence.capture(model, (X,), backward=backward)
    for x in (X, OTHER):
        result = program.verify(model, (x,))
        assert result.ok, str(result)
    found = program.unflatten()(OTHER)
    assert torch.equal(found[1] if callable(backward) else found, model(OTHER))
    assert program.check(model, (OTHER,)) == []


def _positive(x: Tensor) -> float:
    return (x > 0).sum().item()


def _asserting(m: Any, x: Tensor) -> Tensor:
    assert x.max().item() <= 3.0
    return m.linear(x)


def _raising(m: Any, x: Tensor) -> Tensor:
    if _positive(x) > x.numel() - 3:
        raise ValueError("too many")
    return m.linear(x)


def _between(m: Any, x: Tensor) -> Tensor:
    if not (1 <= _positive(x) < 6):
        raise ValueError("too few or too many")
    return m.linear(x)


def _matching(m: Any, x: Tensor) -> Tensor:
    picked = x[x > 0]
    if picked.numel() != 4:
        raise ValueError("as many as there are places")
    return m.linear(x).flatten()[:4] * picked


def _any(m: Any, x: Tensor) -> Tensor:
    assert x.nonzero().shape[0], "nothing is there"
    return m.linear(x)


STATED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Tensor]] = {
    "an assertion about a number": (_asserting, OTHER * 4),
    "an exception": (_raising, OTHER),
    "two comparisons": (_between, OTHER),
    "a size": (_matching, OTHER),
    "a size that is not 0": (_any, torch.zeros(2, 4)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("backward", MODES, ids=["forward", "tangents", "loss"])
@pytest.mark.parametrize("name", STATED)
def test_what_code_states_of_numbers_every_run_is_held_to(name: str, backward: Any) -> None:
    """A branch of which one side raises says what holds; a run that it does not hold for raises there."""
    computed, wrong = STATED[name]
    model = Doing(computed)
    program = whence.capture(model, (X,), backward=backward)
    assert program.verify(model, (X,)).ok
    assert not program.decisions
    with pytest.raises((AssertionError, ValueError)):
        model(wrong)
    for runnable in (program.module(), program.unflatten()):
        with pytest.raises(RuntimeError, match=rf"{Path(__file__).name}:\d+ in {computed.__name__}"):
            runnable(wrong)


def test_other_sizes_are_fixed() -> None:
    """A size of an input is the number that it was."""
    program = whence.capture(Doing(CASES["a mask"]), (X,))
    assert "f32[2, 4]" in str(program.shapes)
    with pytest.raises(whence.CallError, match=r"\[2, 4\]"):
        program.module()(torch.ones(3, 4))


def test_a_model_without_such_numbers_has_no_symbols() -> None:
    """What is not needed is not looked for."""
    assert "=" not in str(whence.capture(Doing(lambda m, x: m.linear(x)), (X,)).shapes)


def test_a_step_reads_a_number() -> None:
    """The same in steps, which may return one."""
    torch.manual_seed(0)
    model = Doing(CASES["rows of a mask"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()

    def step(x: Tensor) -> float:
        loss = model(x).sin().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    for x in (X, OTHER):
        assert program.verify(model, (x,), optimizer=optimizer).ok
    found = program.bind(model, optimizer)(X)
    assert type(found) is float


def further(m: Any, x: Tensor) -> Tensor:
    """Reads a number, and decides by it."""
    count = (x > 0).sum().item()
    chosen = m.linear(x) * count
    return chosen if count > 3 else -chosen


def test_the_line_that_decides_is_named() -> None:
    """Where the first line is no hindrance, the error is about the one that is."""
    with pytest.raises(whence.DataDependent, match="decides what the model does") as caught:
        whence.capture(Doing(further), (X,))
    first = further.__code__.co_firstlineno
    assert str(caught.value.where.line).startswith(f"{__file__}:{first + 4}")


class Jagged(nn.Module):
    """Rows of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, packed: Tensor, offsets: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(packed, offsets)
        return self.project(rows).values().sin()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("backward", [False, True])
def test_a_jagged_tensor_inside(backward: bool) -> None:
    """Its row lengths are a symbol."""
    model, inputs = Jagged(), (torch.randn(5, 4), torch.tensor([0, 2, 5]))
    assert whence.capture(model, inputs, backward=backward).verify(model, inputs).ok


def test_tensor_in_the_place_of_a_size() -> None:
    """C++ that is given a tensor for a size takes its number."""
    inputs = torch.ones(3), torch.tensor(4)
    model = lambda x, count: torch.zeros(2, count) + x.sum()  # noqa: E731
    assert whence.capture(model, inputs).verify(model, (torch.ones(3), torch.tensor(5))).ok


def test_kernel_that_looks_at_memory() -> None:
    """A kernel in C++ that reads numbers where to cut is given them."""
    model = Doing(lambda m, x: torch.cat(torch.tensor_split(x, x[:2].long().abs().cumsum(0))[:2]))
    inputs = (torch.tensor([1.0, 2.0, 5.0, 6.0]),)
    assert whence.capture(model, inputs).verify(model, (torch.tensor([2.0, 1.0, 5.0, 6.0]),)).ok


class Resized(nn.Module):
    """Takes the size of an image from a tensor."""

    def forward(self, image: Tensor, size: Tensor) -> Tensor:
        return nn.functional.interpolate(image, size=(size.item(), size.item()))  # type: ignore[arg-type]


def test_a_refusal_is_not_logged_beside_the_error(caplog: pytest.LogCaptureFixture) -> None:
    """What PyTorch logs of its own errors is in the error; of other threads it logs as ever."""
    with caplog.at_level("WARNING"), pytest.raises(whence.DataDependent):
        whence.capture(Resized(), (torch.ones(1, 3, 8, 8), torch.tensor(5)))
    assert caplog.records == []

"""What a model states with `torch._check` holds in every run, or the run says what does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence

SHAPES = ({0: Dim("batch")}, None)


class Truncated(nn.Module):
    """A number, a mask and a search give sizes; each is stated, and used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        kept: Any = count.item()
        torch._check(kept >= 1)
        torch._check(kept <= x.shape[0])
        hidden = self.linear(x[:kept])
        positive = hidden[x[:kept, 0] > 0]
        torch._check(positive.shape[0] != 2)
        found = x[:kept, 0].nonzero()
        torch._check(found.shape[0] == kept)
        return hidden, positive.sum() + found.sum() * torch.ones(found.shape[0]).sum()


def rows(count: int, positive: int = 0) -> Tensor:
    """So many rows, some of which begin with a positive number."""
    x = torch.randn(count, 4)
    x[:, 0] = -1
    x[:positive, 0] = 1
    return x


@pytest.mark.parametrize("backward", [False, True])
def test_statements_that_hold(backward: bool) -> None:
    """The program is eager, forward and joint, flat and as a tree."""
    model = Truncated()
    program = whence.capture(model, (rows(6), torch.tensor(3)), dynamic_shapes=SHAPES, backward=backward)
    for inputs in ((rows(9, 3), torch.tensor(5)), (rows(1), torch.tensor(1))):
        assert program.verify(model, inputs).ok
        assert torch.equal(program.unflatten()(*inputs)[1], model(*inputs)[1])


RUNNERS: dict[str, Callable[[whence.Program], Any]] = {
    "module": lambda program: program.module(),
    "unflatten": lambda program: program.unflatten(),
    "export": lambda program: program.to_exported_program().module(),
    "back": lambda program: whence.from_exported_program(program.to_exported_program()).unflatten(),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("inputs", "statement"),
    [
        ((rows(9), torch.tensor(0)), "item >= 1"),
        ((rows(9), torch.tensor(11)), "item <= batch"),
        ((rows(9, 2), torch.tensor(5)), "size_of_index != 2"),
        ((torch.zeros(9, 4), torch.tensor(5)), "size_of_nonzero == item"),
    ],
)
def test_statements_that_do_not_hold(runner: str, inputs: Any, statement: str) -> None:
    """A run raises as eager does, and says what, in which module, on which line."""
    model = Truncated()
    program = whence.capture(model, (rows(6), torch.tensor(3)), dynamic_shapes=SHAPES)
    run = RUNNERS[runner](program)
    with pytest.raises(RuntimeError):
        model(*inputs)
    with pytest.raises(RuntimeError) as caught:
        run(*inputs)
    text = str(caught.value)
    assert "torch._check requires it (in module (root), at" in text and "Truncated.forward" in text
    assert statement in text or (statement == "size_of_nonzero == item" and "item == size_of_nonzero" in text)


def test_a_joint_run_checks_too() -> None:
    """The forward of a training program."""
    program = whence.capture(Truncated(), (rows(6), torch.tensor(3)), dynamic_shapes=SHAPES, backward=True)
    with pytest.raises(RuntimeError, match="item <= batch does not hold"):
        program.unflatten()(rows(2), torch.tensor(3))


def test_statements_about_inputs_are_rules() -> None:
    """What depends on sizes of inputs alone is looked at before the run, and is no part of the graph."""

    def halves(x: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0)
        return x.view(2, -1)

    program = whence.capture(halves, (torch.randn(6),), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    assert "_assert_scalar" not in str(program)
    with pytest.raises(whence.CallError, match="a multiple of 2"):
        program.module()(torch.randn(5))


class Numbers(nn.Module):
    """Whole numbers, fractions and truths, of sizes and of arguments."""

    def forward(self, x: Tensor, count: int, scale: float, flag: bool) -> tuple[Any, ...]:
        rows = x.shape[0]
        return (x * scale if flag else x), rows + count, rows / 2, rows > 3, (rows, {"twice": 2 * count})


@pytest.mark.parametrize("make", [*RUNNERS][:2])
def test_numbers_in_and_out(make: str) -> None:
    """Sizes, fractions and truths of sizes are results; a whole number may vary, and others are constants."""
    model, shapes = Numbers(), ({0: Dim.DYNAMIC}, Dim.DYNAMIC, None, None)
    program = whence.capture(model, (torch.randn(4, 2), 3, 2.5, True), dynamic_shapes=shapes)
    run = RUNNERS[make](program)
    for rows_, count in ((4, 3), (2, -1), (7, 0)):
        inputs = (torch.ones(rows_, 2), count, 2.5, True)
        given, expected = run(*inputs), model(*inputs)
        assert given[1:] == expected[1:] and torch.equal(given[0], expected[0])
        assert [type(value) for value in given[1:4]] == [int, float, bool]
        assert program.verify(model, inputs).ok
    for changed, path in (((1.5, True), r"args\[2\]"), ((2.5, False), r"args\[3\]")):
        with pytest.raises(whence.CallError, match=f"{path} was"):
            run(torch.ones(4, 2), 3, *changed)
    (violation,) = program.check(model, (torch.ones(4, 2), 3, 1.5, True))
    assert str(violation).startswith("`args[2]` was 2.5 at capture, is 1.5 now")


@pytest.mark.parametrize(("position", "value"), [(2, "2.5"), (3, "True")])
def test_fractions_and_truths_do_not_vary(position: int, value: str) -> None:
    """As in torch.export; the error says how else."""
    shapes: list[Any] = [{0: Dim.DYNAMIC}, Dim.DYNAMIC, None, None]
    shapes[position] = Dim.DYNAMIC
    with pytest.raises(whence.InvalidShapes, match=rf"pass torch\.tensor\({value}\)"):
        whence.capture(Numbers(), (torch.randn(4, 2), 3, 2.5, True), dynamic_shapes=tuple(shapes))

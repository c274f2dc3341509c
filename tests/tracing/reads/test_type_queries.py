"""What a capture tells code that asks for the class of something."""

import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from whence._torch.fakes import FakeTensor
from whence.tracing.reads.type_queries import TYPE
from whence.tracing.steps.host.stand_ins import growing

X = torch.randn(4, 3)
Ask = Callable[["Asking", Tensor], object]


class Asking(nn.Module):
    """Goes one of two ways."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(3, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if self.ask(self, x) else y * 3


ASKED: dict[str, Ask] = {
    "argument": lambda _, x: type(x) is Tensor,
    "result": lambda model, x: type(model.linear(x)) is Tensor,
    "parameter": lambda model, _: type(model.linear.weight) is nn.Parameter,
    "argument itself": lambda _, x: x.__class__ is Tensor and x.sin().__class__.__name__ == "Tensor",
    "parameter itself": lambda model, _: model.linear.weight.__class__ is nn.Parameter,
    "size": lambda _, x: type(x.shape[0]) is int,
    "number": lambda _, x: type(x.sum().item()) is float,
    "size is an instance": lambda _, x: (
        isinstance(x.shape[0], int) and not isinstance(x.shape[0], float | bool)
    ),
    "number is an instance": lambda _, x: isinstance(x.sum().item(), (str, float)),
    "count is an instance": lambda _, x: isinstance((x > 0).sum().item(), numbers.Integral),
    "comparison is an instance": lambda _, x: isinstance(x.shape[0] > 3, bool),
    "name": lambda _, x: type(x).__name__ == "Tensor",
    "key": lambda _, x: {Tensor: 1}.get(type(x)),
    "class": lambda model, _: type(type(model)) is type and isinstance(Tensor, type),
    "either": lambda _, x: isinstance(x, type | Tensor) and type.__name__ == "type",
    "new class": lambda _, __: type("New", (), {"two": 2}).two == 2,  # type: ignore[attr-defined]
    "written type": lambda _, __: type[int] == type[int] and issubclass(type, type),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("backward", [False, lambda out: out.sum()], ids=["forward", "joint"])
@pytest.mark.parametrize("is_open", [False, True])
def test_the_class_is_eager_s(name: str, backward: Any, is_open: bool) -> None:
    """Not that of the fake tensor or the symbol which stands there; the name is as it was afterwards."""
    model, shapes = Asking(ASKED[name]), ({0: torch.export.Dim.AUTO},) if is_open else None
    program = whence.capture(model, (X,), backward=backward, dynamic_shapes=shapes)
    assert program.verify(model, (X,)).ok
    assert program.check(model, (X,)) == []
    assert (
        not {"type", "isinstance"} & globals().keys()
        and type(X) is Tensor
        and FakeTensor.__bases__ == (Tensor,)
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_the_class_of_a_rate(is_late: bool) -> None:
    """In a step it is a float, and after its schedule refused as its number is."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(x: Tensor) -> Tensor:
        rate = optimizer.param_groups[0]["lr"]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rate = optimizer.param_groups[0]["lr"] if is_late else rate
        return loss if type(rate) is float else -loss

    if is_late:
        with pytest.raises(whence.UnsupportedStep, match="reads 'lr' of its group after it"):
            whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    else:
        bound = whence.capture_step(step, (X,), model=model, optimizer=optimizer).bind(model, optimizer)
        assert bound(X) > 0
    assert "type" not in globals()


def test_what_a_list_that_grows_is() -> None:
    """The stand-in of a list is one."""
    assert TYPE(growing("a list", ValueError, [])) is list


def of_whole_number(_: Asking, x: Tensor) -> bool:
    match x.shape:
        case (int(), int()):
            return True
    return False


def test_patterns_ask_numbers_themselves() -> None:
    """What stands for a size that may vary has no class of Python: that line is refused."""
    model = Asking(of_whole_number)
    assert torch.equal(whence.capture(model, (X,)).module()(X), model(X))
    with pytest.raises(whence.UnsupportedOperator, match=r"the pattern `case int\(\)`") as caught:
        whence.capture(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert "test_type_queries.py" in str(caught.value.where)
    assert "isinstance(number, int)" in caught.value.remedy

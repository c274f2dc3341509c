"""Which road is taken to a program whose example decides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.failing import Doing

X = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 0.0, -1.0, 2.0]])


def body(decides: Callable[[Tensor], Any]) -> Doing:
    return Doing(lambda m, x: m.linear(x) * decides(x))


def asked(model: Any, **options: Any) -> list[tuple[str, Any]]:
    program = whence.capture(model, (X,), decide="example", **options)
    assert program.verify(model, (X,)).ok
    return [(row.asked, row.answer) for row in program.decisions]


def test_only_what_is_asked_is_decided() -> None:
    """A number that is computed with is any number; the comparison alone is held to its answer."""
    model = body(lambda x: x.sum().item() * (2 if x.max().item() > 2.5 else 3))
    assert asked(model) == [("max_1.item() > 2.5", True)]
    program = whence.capture(model, (X,), decide="example")
    assert program.verify(model, (X * 2,)).ok


def test_what_cannot_be_a_symbol_is_the_examples() -> None:
    """The key of a dict is what it was."""
    assert asked(body(lambda x: {3: 2.0}[x.max().long().item()])) == [("_to_copy", 3)]  # type: ignore[index]


def test_of_an_integer_the_whole_part_is_decided() -> None:
    """What `int()` cuts off may be anything; of numbers that no tensor of integers holds nothing is."""
    model = body(lambda x: range(9)[int(x.max())])
    assert asked(model) == [("_to_copy", 3)]
    program = whence.capture(model, (X,), decide="example")
    assert program.verify(model, (X + 0.5,)).ok
    assert asked(body(lambda x: len(str(int(x.max() * 1e20))))) == [("mul", float(torch.tensor(3e20)))]
    with pytest.raises(ValueError, match="NaN"):
        whence.capture(body(lambda x: int(x.max() / 0 * 0)), (X,), decide="example")


def test_nothing_is_decided_without_need() -> None:
    """A model that can be captured as it is has no decisions, and replays its calls."""
    assert asked(body(lambda x: x[x > 0].sum())) == []


def test_with_sizes_that_vary() -> None:
    """Decisions beside open sizes; other data of another size may decide the same."""
    model = Doing(lambda m, x: m.linear(x) if x.sum() > 0 else x)
    program = whence.capture(model, (X,), decide="example", dynamic_shapes={"x": {0: whence_dim()}})
    assert program.verify(model, (torch.ones(5, 4),)).ok
    with pytest.raises(whence.StaleCapture, match="gt is False, and was True"):
        program.module()(-torch.ones(5, 4))


def whence_dim() -> Any:
    return torch.export.Dim.DYNAMIC


@pytest.mark.parametrize("options", [{"decide": "both"}, {"decide": "example", "strict": True}])
def test_options(options: dict[str, Any]) -> None:
    """Only an example can decide, and only where it runs."""
    with pytest.raises(whence.UsageError, match="decide"):
        whence.capture(Doing(lambda m, x: m.linear(x)), (X,), **options)


def test_a_fake_example_decides_nothing() -> None:
    """It has no values, which is said."""
    model = Doing(lambda m, x: m.linear(x) if x.sum() > 0 else x)
    with pytest.raises(whence.DataDependent, match="needs the value"):
        whence.capture(model.to("meta"), (X.to("meta"),), decide="example")


def test_the_models_own_error() -> None:
    """Where the way that the example takes fails, that is the error."""

    def fails(x: Tensor) -> float:
        numbers: dict[int, float] = {}
        return numbers[int(x.max())]

    with pytest.raises(KeyError):
        whence.capture(body(fails), (X,), decide="example")


def test_a_write_to_an_array_is_refused() -> None:
    """It would be one to the tensor, which nobody sees; a copy may be written."""

    def written(m: Any, x: Tensor) -> Tensor:
        x.numpy()[0] = 5
        return m.linear(x)

    def copied(m: Any, x: Tensor) -> Tensor:
        found = x.numpy().copy()
        found[0] = 5
        return m.linear(x) + torch.from_numpy(found)

    with pytest.raises(whence.UnsupportedMutation, match="array of a tensor") as caught:
        whence.capture(Doing(written), (X,), decide="example")
    assert "test_decisions.py" in str(caught.value.where.line)
    assert asked(Doing(copied))[0][0] == "the content of x"


class Named(nn.Module):
    """Finds a module by a number in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{number}": nn.Linear(4, 4) for number in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for number in (x.sum(1) > 0).nonzero():
            x = self.experts[f"expert_{number[0]}"](x)
        return x


def test_a_whole_number_in_a_text_is_decided() -> None:
    """By which a model finds its modules."""
    model, x = Named(), torch.diag(torch.tensor([1.0, -1.0, 1.0, -1.0]))[:3]
    program = whence.capture(model, (x,), decide="example")
    assert program.verify(model, (x,)).ok
    with pytest.raises(whence.StaleCapture):
        program.module()(-x)

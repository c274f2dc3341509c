"""Whoever puts a function of their own in the place of PyTorch's or Python's is seen."""

import builtins
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whence
from whence.errors import StaleCapture


class Calls(nn.Module):
    """Calls functions of PyTorch's by their names: its own code does, and that of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.sizes = [1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(F.gelu(self.project(x)).relu()) @ x.mT
        return self.attend(x, x, x)[0] * len(self.sizes)


_X = torch.randn(2, 4, 4)
REPLACED = (
    pytest.param(F, "gelu", id="named by the model"),
    pytest.param(torch, "sin", id="of torch"),
    pytest.param(Tensor, "relu", id="a method"),
    pytest.param(Tensor, "__matmul__", id="an operator"),
    pytest.param(F, "linear", id="named by torch.nn"),
    pytest.param(F, "scaled_dot_product_attention", id="named by a function of torch.nn.functional"),
    pytest.param(builtins, "len", id="Python's"),
)


@pytest.fixture(scope="module")
def model() -> Calls:
    torch.manual_seed(0)
    return Calls()


@pytest.fixture(scope="module")
def program(model: Calls) -> whence.Program:
    return whence.capture(model, (_X,))


@pytest.fixture(scope="module")
def loaded(model: Calls, program: whence.Program, tmp_path_factory: pytest.TempPathFactory) -> whence.Program:
    path = tmp_path_factory.mktemp("programs") / "calls.whence"
    program.save(path)
    return whence.load(path, model=model)


@pytest.mark.parametrize(("owner", "name"), REPLACED)
@pytest.mark.parametrize("way", ["program", "loaded"])
def test_functions_in_the_place_of_pytorchs(
    owner: Any, name: str, way: str, model: Calls, request: pytest.FixtureRequest
) -> None:
    """A check names them, of a program that was loaded too; and holds again when they are gone."""
    checked = request.getfixturevalue(way)
    assert checked.check(model, (_X,)) == []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(owner, name, partial(getattr(owner, name)))
        (found,) = checked.check(model, (_X,))
    spelled = f"torch.Tensor.{name}" if owner is Tensor else f"{owner.__name__}.{name}"
    assert spelled in found.found and "replaced functions" in str(found)
    assert checked.check(model, (_X,)) == []


def test_a_variable_that_covers_a_name_of_pythons(
    model: Calls, program: whence.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code finds it from then on in the place of Python's own."""
    monkeypatch.setitem(globals(), "len", lambda _: 7)
    (found,) = program.check(model, (_X,))
    assert f"{__name__}.len" in found.found
    assert not program.verify(model, (_X,)).ok


def test_what_was_there_at_the_capture_is_compared_for_itself(
    model: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that came first is no violation; another one in its place is, and PyTorch's own again."""
    monkeypatch.setattr(F, "linear", partial(F.linear))
    program = whence.capture(model, (_X,))
    assert program.check(model, (_X,)) == []
    with monkeypatch.context() as patches:
        patches.setattr(F, "linear", lambda *args: torch.zeros(2, 4, 4))
        assert [each.guard.what for each in program.check(model, (_X,))] == ["torch.nn.functional.linear"]
    monkeypatch.undo()
    assert "replaced functions" in str(program.check(model, (_X,)))


def test_a_step_whose_code_calls_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step calls itself is looked at before each run, and nothing is changed."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, (_X,), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(_X)
    before = model.weight.clone()
    monkeypatch.setattr(F, "mse_loss", F.l1_loss)
    with pytest.raises(StaleCapture, match="mse_loss"):
        run(_X)
    assert torch.equal(model.weight, before)


def test_a_capture_puts_nothing_in_the_place_of_anything(model: Calls) -> None:
    """What stands under names while a capture goes on is no other function."""
    inner = whence.capture(model, (_X,))
    found: list[object] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.extend(inner.check(model))
            return x.sin() if isinstance(x, Tensor) else x

    whence.capture(Asks(), (_X,))
    assert found == []

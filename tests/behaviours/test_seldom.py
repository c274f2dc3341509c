"""What models seldom do: captured with eager's bits, refused by name, or failing as they do in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import whence
from tests.checks import differing, gradients, verified
from tests.releases import SCRIPT_IS_DEPRECATED
from whence.rewriting import CommonSubexpressions

X = torch.randn(2, 4)


class Doing(nn.Module):
    """Does something beside a linear layer."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.body, self.gamma = nn.Linear(4, 4), body, torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Named(Doing):
    """An argument has the name that the program would give to the constant `gamma`."""

    def forward(self, x: Tensor, c_gamma: Tensor | None = None) -> Any:
        return self.linear(x) * self.gamma + c_gamma


@pytest.mark.parametrize("backward", [False, True, torch.sum], ids=["forward", "tangents", "loss"])
def test_argument_with_the_name_of_a_constant(backward: Any) -> None:
    """Both keep their values, and the argument its name."""
    model, given = Named(None), (X, torch.randn(4))  # type: ignore[arg-type]
    program = verified(model, *given, backward=backward)
    assert program.input("args[1]").name == "c_gamma"
    assert program.input("gamma").name != "c_gamma"


@pytest.mark.filterwarnings("ignore:Pred is a Python constant")
@pytest.mark.parametrize(
    "condition",
    [lambda x: x.dim() > 1, lambda x: x.shape[0] > 2, lambda _: True],
    ids=["dimensions", "size", "flag"],
)
def test_branch_over_a_number(condition: Callable[[Tensor], bool]) -> None:
    """`torch.cond` over what Python knows takes its branch, as in eager mode."""
    body = lambda m, x: torch.cond(condition(x), torch.sin, torch.cos, (m.linear(x),))  # noqa: E731
    verified(Doing(body), X, backward=True)


def number_in_a_loop(inside: str) -> Doing:
    """Reads a number where a loop decides, or in what it repeats."""

    def body(m: Doing, x: Tensor) -> Any:
        more = (lambda i, y: i.item() < 3) if inside == "condition" else (lambda i, y: i < 3)
        step = (lambda i, y: (i + 1, y * i.item())) if inside == "body" else (lambda i, y: (i + 1, y.sin()))
        return while_loop(more, step, (torch.tensor(0), m.linear(x)))[1]

    return Doing(body)


@pytest.mark.parametrize(("inside", "backward"), [("condition", False), ("condition", True), ("body", True)])
def test_number_in_a_loop(inside: str, backward: bool) -> None:
    """`.item()` where `while_loop` decides, or is differentiated, is refused, with the line."""
    with pytest.raises(whence.DataDependent, match="a number") as caught:
        whence.capture(number_in_a_loop(inside), (X,), backward=backward)
    assert caught.value.where.line is not None and "test_seldom.py" in caught.value.where.line


def test_number_in_what_a_loop_repeats() -> None:
    """In a forward it is a node of what is repeated."""
    model = number_in_a_loop("body").requires_grad_(False)
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


def test_optimizer_inside() -> None:
    """A step inside forward writes gradients: refused, and the model is as before."""

    def body(m: Doing, x: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(m.linear.parameters(), lr=0.1)
        m.linear(x).sum().backward()
        optimizer.step()
        result: Tensor = m.linear(x)
        return result

    model = Doing(body)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(whence.SideEffect, match=r"writes the gradients of linear.weight"):
        whence.capture(model, (X,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.linear.weight.grad is None


def test_loss_without_a_gradient_in_a_step() -> None:
    """PyTorch's own error, as in eager mode, says what was captured."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss = model(x).detach().sum()
        loss.backward()
        return loss

    for run in (step, lambda x: whence.capture_step(step, (x,), model=model)):
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            run(X)
    assert "whence was capturing step" in caught.value.__notes__[0]


def test_flex_attention_that_trains_on_a_cpu() -> None:
    """PyTorch does not differentiate it there; its own error stays, and the forward alone is captured."""
    model, x = Doing(lambda m, x: flex_attention(m.linear(x), x, x)), torch.randn(1, 2, 8, 4)
    for run in (model, lambda x: whence.capture(model, (x,))):
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            run(x)
    verified(model.requires_grad_(False), x)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "loss"])
def test_copies_of_a_weight_that_is_normed_the_old_way(backward: Any) -> None:
    """`copy.deepcopy` refuses the model itself, which holds a result; programs and trees are copied."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    program, expected = verified(model, X, backward=backward), model(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    for run in (
        copy.deepcopy(program).module(),
        copy.deepcopy(program.unflatten()),
        program.unflatten(copy=True),
    ):
        assert torch.equal(run(X)[1] if backward else run(X), expected)


def test_what_a_tree_shows_of_itself_is_small() -> None:
    """The calls of a deep tree are one line, and one warning is told of all its modules."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(20)))
    tree = whence.capture(model, (X,)).unflatten()
    assert repr(tree.calls) == "(<call (root)>,)"
    with pytest.warns(UserWarning, match=r"^61 module\(s\) were captured in training mode") as told:
        tree.eval()
    assert len(told) == 1


def doubled(x: Tensor) -> Tensor:
    """The double of a sine."""
    return x.sin() * 2.0


def test_function_that_torchscript_has_optimized() -> None:
    """Its derivative is TorchScript's by then: joint programs have it, and forward programs refuse.

    When it optimizes depends on what else the process has run; before, forward programs have the derivative.
    """
    with pytest.warns(SCRIPT_IS_DEPRECATED):
        scripted = torch.jit.script(doubled)
    model = Doing(lambda m, x: scripted(m.linear(x)))
    for _ in range(3):
        model(X).sum().backward()
    verified(model, X, backward=torch.sum)
    model.zero_grad()
    model(X).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    result = whence.capture(model, (X,)).module()(X)
    assert torch.equal(result, model(X))
    try:
        result.sum().backward()
    except whence.NotDifferentiable as refused:
        assert "TorchScript, of a function that it has optimized" in str(refused)
    else:
        assert not differing(expected, gradients(model))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_branches_of_a_capture_without_gradients() -> None:
    """What whence does to record them turns no gradients on, neither in its program nor in a call of that."""
    model = Doing(lambda m, x: torch.cond(x.sum() > 0, m.linear, torch.cos, (x,)))
    with torch.no_grad():
        program = verified(model, X)
        assert not program.module()(X).requires_grad
    assert not program.facts.turned_on


class Listening(nn.Module):
    """A recurrent kernel that gives other last bits where grad mode is on, under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.lstm(x)[0]
        return self.head(x)


@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "loss"])
def test_kernel_that_asks_for_the_grad_mode(backward: Any, tmp_path: Path) -> None:
    """It hears the mode of the model's own line in all that runs, also after a pass and from a file."""
    torch.manual_seed(0)
    model, x = Listening(), torch.randn(4, 20, 64)
    expected = model(x)
    program = verified(model, x, backward=backward)
    assert torch.equal(_result(program.bind(model)(x)), expected)
    assert torch.equal(program.run((x,), read="head")["head"], expected)
    program.apply(CommonSubexpressions()).save(tmp_path / "listening.whence")
    loaded = whence.load(tmp_path / "listening.whence", model=model)
    assert torch.equal(_result(loaded.unflatten()(x)), expected)


def test_step_with_a_kernel_that_asks_for_the_grad_mode() -> None:
    """A teacher under `no_grad` answers in a step as it does in eager mode, beside the model that learns."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(4, 20, 64)
    both = nn.ModuleDict({"model": model, "teacher": nn.LSTM(64, 64, batch_first=True)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = both["teacher"](x)[0]
        loss = (both["teacher"](model(x))[0] - wanted).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    program = whence.capture_step(step, (x,), model=both, optimizer=optimizer)
    assert program.verify(both, (x,), optimizer=optimizer).ok
    twin = copy.deepcopy(both)
    found = program.bind(both, optimizer)(x)
    both.load_state_dict(twin.state_dict())
    assert torch.equal(found, step(x))


def _result(returned: Any) -> Tensor:
    """What the model returns, with a loss or without."""
    return returned[1] if isinstance(returned, tuple) else returned

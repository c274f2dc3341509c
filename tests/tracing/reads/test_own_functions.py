"""Whoever puts a function of their own in the place of PyTorch's or Python's is seen."""

import builtins
import functools
import importlib
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import whence
from tests.tracing.steps.small import zero_first
from whence._torch.patching import patched
from whence.dependence.asking import attempt
from whence.errors import StaleCapture
from whence.tracing.reads import own_functions


class Calls(nn.Module):
    """Calls functions of PyTorch's by their names: its own code does, and that of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recur, self.prior = nn.LSTM(4, 4, batch_first=True), Normal(0.0, 1.0)
        self.sizes = [1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = math.sqrt(x.shape[-1]) + x.mean()
        x = torch.sin(F.gelu(self.project(x)).relu()) @ x.mT * scale
        x = self.attend(x, x, x)[0] * len(self.sizes)
        x = functools.reduce(torch.add, itertools.chain([x], [self.recur(x)[0]]))
        x = x + self.prior.log_prob(x) * float(np.hypot(3.0, 4.0)) / float(np.linalg.norm([3.0]))
        return nn.utils.rnn.pad_sequence([*x], batch_first=True)


_X = torch.randn(2, 4, 4)
REPLACED = (
    pytest.param(F, "gelu", id="named by the model"),
    pytest.param(torch, "sin", id="of torch"),
    pytest.param(Tensor, "relu", id="a method"),
    pytest.param(Tensor, "__matmul__", id="an operator"),
    pytest.param(F, "linear", id="named by torch.nn"),
    pytest.param(F, "scaled_dot_product_attention", id="named by a function of torch.nn.functional"),
    pytest.param(builtins, "len", id="Python's"),
    pytest.param(math, "sqrt", id="of Python's math"),
    pytest.param(torch, "no_grad", id="a class"),
    pytest.param(nn.utils.rnn, "pad_sequence", id="of torch.nn.utils.rnn"),
    pytest.param(functools, "reduce", id="of Python's functools"),
    pytest.param(itertools, "chain", id="of Python's itertools"),
    pytest.param(np, "hypot", id="of NumPy"),
    pytest.param(np.linalg, "norm", id="of NumPy, in Python"),
    pytest.param(Normal, "log_prob", id="of a distribution"),
    pytest.param(torch._VF, "lstm", id="of recurrent networks"),
    pytest.param(nn.Module, "_call_impl", id="what calls modules"),
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


class _Computes:
    """A loss that is an object, and calls a helper."""

    def __call__(self, out: Tensor) -> Tensor:
        return _helper(out)


def _helper(out: Tensor) -> Tensor:
    return F.smooth_l1_loss(out, torch.zeros_like(out))


_criterion = nn.SmoothL1Loss()


def _by_module(out: Tensor) -> Tensor:
    return _criterion(out, torch.zeros_like(out))


@pytest.mark.parametrize("loss_of", [lambda out: F.smooth_l1_loss(out, out * 2), _helper, _by_module])
def test_a_step_whose_code_calls_another_function(
    loss_of: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step calls itself, or a module around it, is looked at before each run; nothing is changed."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, (_X,), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(_X)
    before = model.weight.clone()
    monkeypatch.setattr(F, "smooth_l1_loss", F.l1_loss)
    with pytest.raises(StaleCapture, match="smooth_l1_loss"):
        run(_X)
    assert torch.equal(model.weight, before)


def test_a_step_whose_optimizer_calls_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's optimizers call functions by their names, too."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    step = zero_first(model, optimizer)
    program = whence.capture_step(step, (_X,), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(_X)
    monkeypatch.setattr(torch, "_foreach_add_", lambda *_given, **_named: None)
    with pytest.raises(StaleCapture, match="_foreach_add_"):
        run(_X)


class _Waits(nn.Module):
    """Lets another thread do something in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        _MIDDLE.set()
        _DONE.wait(60)
        return self.project(x).sin() if isinstance(x, Tensor) else x * max(1, 2)


_MIDDLE, _DONE = threading.Event(), threading.Event()


@pytest.mark.parametrize("replaced_before", [False, True])
def test_a_check_while_another_thread_captures(
    model: Calls, replaced_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a capture puts there for its time is no other function to a check in another thread."""
    if replaced_before:
        for owner, name in REPLACED_BEFORE:
            monkeypatch.setattr(owner, name, partial(getattr(owner, name)))
    program = whence.capture(model, (_X,), backward=True)
    waits = _Waits()
    found = _while(partial(whence.capture, waits, (_X,), backward=True), partial(program.check, model, (_X,)))
    assert found == []


def test_a_capture_while_another_one_has_put_something_there(model: Calls) -> None:
    """As captures in other threads do, for their time: a program expects what was there before."""
    call = nn.Module.__call__

    def put_there(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    with patched(nn.Module, "__call__", put_there):
        program = whence.capture(model, (_X,))
    assert program.check(model, (_X,)) == []


def test_a_check_while_another_thread_traces(model: Calls) -> None:
    """torch.fx puts its own in the place of calls of modules for all threads; strict captures do that."""
    program = whence.capture(model, (_X,), backward=True)
    trace = partial(torch.fx.symbolic_trace, _Waits())
    assert _while(trace, partial(program.check, model, (_X,))) == []


def _while(capture: Callable[[], object], look: Callable[[], object]) -> object:
    """What another thread finds in the middle of a capture."""
    found: list[object] = []

    def work() -> None:
        _MIDDLE.wait(60)
        found.append(attempt(look))
        _DONE.set()

    looks = threading.Thread(target=work)
    looks.start()
    capture()
    looks.join()
    _MIDDLE.clear()
    _DONE.clear()
    return found[0]


def _stepping(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, optimizer


def test_a_bound_step_while_another_thread_captures_one() -> None:
    """The optimizer's methods are its own, whatever a capture has put there for its time."""
    model, waits = nn.Linear(4, 4), _Waits()
    step, optimizer = _stepping(model)
    run = whence.capture_step(step, (_X,), model=model, optimizer=optimizer).bind(model, optimizer)
    run(_X)
    other, others = _stepping(waits)
    capture = partial(whence.capture_step, other, (_X,), model=waits, optimizer=others)
    assert isinstance(_while(capture, partial(run, _X)), Tensor)


REPLACED_BEFORE = ((torch, "is_grad_enabled"), (builtins, "max"), (F, "linear"))


@pytest.mark.parametrize("loss", [_helper, _Computes(), _by_module, partial(_helper)])
def test_losses_call_them_too(loss: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loss is an object, or a module that the captured one does not hold."""
    model = nn.Linear(4, 4)
    program = whence.capture(model, (_X,), backward=loss)
    assert program.check(model, (_X,)) == []
    monkeypatch.setattr(F, "smooth_l1_loss", F.l1_loss)
    (found,) = program.check(model, (_X,))
    assert "smooth_l1_loss" in found.found


class Speaks(nn.Module):
    """Has methods with names under which tools put functions of their own."""

    def load(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            help(self)
        return x * self.load()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda patch: patch.setattr(torch, "load", partial(torch.load)), id="a tool's"),
        pytest.param(lambda patch: patch.setitem(globals(), "help", partial(help)), id="for people"),
        pytest.param(lambda patch: patch.setattr(torch, "sinh", partial(torch.sinh)), id="not called"),
    ],
)
def test_what_others_may_replace(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that compute nothing for a model, and those that it does not name."""
    model = Speaks()
    program = whence.capture(model, (_X,))
    change(monkeypatch)
    assert program.check(model, (_X,)) == []


def test_names_of_other_releases_and_functions_that_pytorch_wraps() -> None:
    """A name that stands for no function here is none that was replaced, and neither is what PyTorch puts
    around a function of its own when its compiler is imported."""
    importlib.import_module("torch._dynamo")
    names = (
        "torch.float32 torch.of_another_release torch.elsewhere.sin torch.manual_seed torch._check_is_size"
    )
    assert own_functions.replaced(None, names) == ()
    assert own_functions.covered({"file": SimpleNamespace(len=1)}, "file:len,max other:len") == ("file.len",)


_BEFORE = """
import functools, torch, torch.nn.functional as F

class Kernel:
    def __call__(self, x):
        return x.sigmoid()

own, F.gelu, F.silu = F.silu, Kernel(), functools.partial(F.silu, inplace=False)

import whence

class Model(torch.nn.Module):
    def forward(self, x):
        return F.gelu(x) + F.silu(x)

model, x = Model(), torch.randn(3)
program = whence.capture(model, (x,))
assert program.check(model, (x,)) == [], program.check(model, (x,))
F.gelu = Kernel().__call__
assert "gelu" in str(program.check(model, (x,)))
F.gelu, F.silu = Kernel(), own
assert "silu" in str(program.check(model, (x,)))
"""


def test_what_was_there_before_whence_came() -> None:
    """A function, or another thing that can be called, in the place of PyTorch's is compared for itself."""
    subprocess.run([sys.executable, "-c", _BEFORE], check=True, timeout=120)

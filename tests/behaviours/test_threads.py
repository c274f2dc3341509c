"""A capture does not disturb models that run in other threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import whence
from tests import zoo
from tests.tracing.failing import Doing

X = torch.randn(2, 3, zoo.WIDTH)


class Background:
    """Runs something again and again in another thread, and keeps what is unexpected."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.unexpected: list[object] = []
        self.rounds = 0
        self._stop = Event()
        self._started = Event()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                found = self.work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                found = error
            if found is not None:
                self.unexpected.append(found)
            self.rounds += 1
            self._started.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = Thread(target=self._run)
        thread.start()
        self._started.wait()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def eager(model: nn.Module) -> Callable[[], object]:
    """Runs the model forward and backward, and reports results that are not the expected ones."""
    parameters = list(model.parameters())
    output = model(X)
    expected = [output, *torch.autograd.grad(output.sum(), parameters)]

    def work() -> object:
        output = model(X)
        found = [output, *torch.autograd.grad(output.sum(), parameters)]
        same = all(map(torch.equal, expected, found)) and {type(t) for t in found} == {Tensor}
        return None if same else "other numbers"

    return work


def asked() -> object:
    """Reports when library code on this thread is told that it is being compiled."""
    told = torch.compiler.is_compiling() or torch.compiler.is_exporting()
    return "told that it is being compiled" if told else None


class Asking(nn.Module):
    """Asks whether it is being compiled, and answers in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = zoo.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.block(x) * 2
        return self.block(x) if x.isfinite().all() else x


def captures(model: nn.Module, background: Background) -> list[whence.Program]:
    """Captures until the background has run a good while beside them."""
    programs: list[whence.Program] = []
    with background.running():
        while len(programs) < 5 or (background.rounds < 20 and len(programs) < 40):
            programs.append(whence.capture(model, (X,), backward=True))
    return programs


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [zoo.Mlp, zoo.SharedLayer, Asking])
def test_same_model_in_another_thread(build: Callable[[], nn.Module]) -> None:
    """The model that is being captured gives its usual numbers to another thread meanwhile."""
    model = build()
    background = Background(eager(model))
    captures(model, background)
    assert background.rounds > 0
    assert background.unexpected == []


def test_another_model_in_another_thread() -> None:
    """Another model in another thread gives its usual numbers, and none of its calls are recorded."""
    model, other = zoo.Mlp(), zoo.SharedLayer()
    alone = str(whence.capture(model, (X,), backward=True))
    background = Background(eager(other))
    assert {str(program) for program in captures(model, background)} == {alone}
    assert background.unexpected == []


def compiled() -> None:
    torch.compiler.reset()
    torch.compile(nn.Sequential(nn.Linear(zoo.WIDTH, 2), nn.ReLU()), backend="aot_eager", fullgraph=True)(X)


TRACED: dict[str, Callable[[], object]] = {
    "make_fx": lambda: make_fx(torch.sin)(X) and None,
    "export": lambda: torch.export.export(zoo.Mlp(), (X,)) and None,
    "compile": compiled,
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", TRACED)
def test_what_pytorch_traces_in_another_thread(name: str) -> None:
    """It is no part of a program, hides no module call from it, and is not disturbed."""
    model = zoo.Mlp()
    alone = str(whence.capture(model, (X,), backward=True))
    background = Background(TRACED[name])
    assert {str(program) for program in captures(model, background)} == {alone}
    assert background.unexpected == []


@pytest.mark.sweep
def test_a_step_beside_the_compiler() -> None:
    """Its optimizer is told that nothing is compiled: told otherwise it computes with tensors."""
    model = zoo.Mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    def page() -> str:
        return str(whence.capture_step(step, (X,), model=model, optimizer=optimizer))

    alone, background = page(), Background(compiled)
    with background.running():
        assert {page() for _ in range(3)} == {alone}
    assert background.unexpected == []


def test_other_threads_are_not_told_that_they_are_compiled() -> None:
    """`torch.compiler.is_compiling()` stays false in other threads while this one captures."""
    background = Background(asked)
    captures(Asking(), background)
    assert background.unexpected == []


def test_captured_thread_is_told_that_it_is_compiled() -> None:
    """The captured model sees `torch.compiler.is_compiling()` true, and the program says where it asked."""
    model = Asking()
    program = whence.capture(model, (X,))
    assert program.select(":: aten.mul")[-1].args[1] == 2
    assert [source.function for source in program.asked] == ["Asking.forward"]
    assert not torch.compiler.is_compiling()


@pytest.mark.sweep
def test_captures_in_two_threads() -> None:
    """Two threads that capture at the same time both get what each gets alone."""
    first, second = zoo.Mlp(), zoo.SharedLayer()
    expected = [str(whence.capture(model, (X,), backward=True)) for model in (first, second)]

    def other() -> object:
        text = str(whence.capture(second, (X,), backward=True))
        return None if text == expected[1] else text

    background = Background(other)
    assert {str(program) for program in captures(first, background)} == {expected[0]}
    assert background.unexpected == []
    assert nn.Module.__dict__["__call__"].__name__ == "_wrapped_call_impl"


def in_a_thread(_: Doing, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = Thread(target=lambda: found.append(x.sin()))
    thread.start()
    thread.join()
    return found[0]


def in_a_pool(m: Doing, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return sum(pool.map(m.linear, [x, x]))


def in_a_pool_of_its_own(m: Doing, x: Tensor) -> Tensor:
    return x * POOL.submit(torch.sum, m.linear.weight).result()


POOL = ThreadPoolExecutor(1)


@pytest.mark.parametrize("body", [in_a_thread, in_a_pool, in_a_pool_of_its_own])
def test_computing_in_another_thread_is_refused(body: Callable[..., Tensor]) -> None:
    """The other thread is stopped, and the error names the line where it was given its work."""
    model = Doing(body)
    for backward in (False, torch.sum):
        with pytest.raises(whence.SideEffect, match="computes in another thread") as caught:
            whence.capture(model, (torch.ones(4, 4),), backward=backward)
        assert f"in {body.__name__}" in str(caught.value.where)
    assert model(torch.ones(4, 4)).isfinite().all()


def test_threads_that_do_not_compute() -> None:
    """A thread may do what has no part in the program, and whatever it wants once the capture is over."""
    go, done = Event(), Event()

    def later() -> None:
        go.wait(10)
        torch.ones(2).sin()
        done.set()

    def body(m: Doing, x: Tensor) -> Tensor:
        Thread(target=later).start()
        return m.linear(x)

    whence.capture(Doing(body), (torch.ones(4, 4),))
    go.set()
    assert done.wait(10)

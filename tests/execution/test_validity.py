"""Models whose first run changes what it reads."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import same_bits

X = torch.randn(2, 4)


class Options:
    """Given half empty."""

    def __init__(self) -> None:
        self.kind: str | None = None


class Settling(nn.Module):
    """Fills in its options and installs a hook in its first run, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.options = Options()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.options.kind is None:
            self.options.kind = "wide"
        if not hasattr(self, "installed"):
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
        if 4 not in self.seen:
            self.seen.append(4)
        result: Tensor = self.linear(x)
        return result.relu() if self.options.kind == "wide" else result


def test_the_capture_holds_before_and_after_the_first_run() -> None:
    """Both states are what the model does the same in."""
    model = Settling()
    program = whence.capture(model, (X,))
    assert vars(model.options) == {"kind": None}
    assert (model.seen, hasattr(model, "installed"), len(model.linear._forward_hooks)) == ([], False, 0)
    assert program.check(model, (X,)) == []
    expected = model(X)
    assert vars(model.options) == {"kind": "wide"}
    assert program.check(model, (X,)) == []
    assert same_bits(program.guarded(model)(X), expected)
    assert same_bits(model(X), expected)


class Passing(nn.Module):
    """Hands on what one of its methods found in an attribute, and takes it away again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.found: Tensor | None = None

    def look(self, x: Tensor) -> Tensor:
        self.found = x.softmax(-1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        result = self.look(self.linear(x))
        assert self.found is not None
        result = result * self.found
        self.found = None
        return result


def test_what_is_put_back_is_no_change() -> None:
    """An attribute that is written, read and put back is as it was: the next run does the same."""
    model = Passing()
    program = whence.capture(model, (X,))
    assert program.guards.changes == ()
    assert same_bits(program.bind(model)(X), model(X))


def test_half_of_it_is_stale() -> None:
    """A state that is neither is told of: the model would do something else in it."""
    model = Settling()
    program = whence.capture(model, (X,))
    model(X)
    model.options.kind = "narrow"
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["options.kind"]
    model.options.kind = "wide"
    model.linear._forward_hooks.clear()
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["hooks of linear"]


def test_both_states_are_printed() -> None:
    """The page says what the first run changes."""
    page = str(whence.capture(Settling(), (X,)).guards)
    before, after = page.split("or, once the model has run,")
    assert "kind                     None" in before
    assert "options.kind             'wide'" in after
    assert "installed                True" in after


class Counting(nn.Module):
    """Each run computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 1

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.runs
        self.runs += 1
        return result


def test_a_model_that_computes_with_its_counter_is_refused() -> None:
    """The second call of a program would compute what the first did; the error names counter and line."""
    model = Counting()
    line = Counting.forward.__code__.co_firstlineno + 2
    with pytest.raises(whence.LostState, match="Counting changes runs while it runs") as caught:
        whence.capture(model, (X,))
    assert (caught.value.where.line, model.runs) == (f"{__file__}:{line} in Counting.forward", 1)


def counted(x: Tensor) -> Tensor:
    """Computes with what hangs on it."""
    counted.shapes.append(x.shape)  # type: ignore[attr-defined]
    return x * len(counted.shapes)  # type: ignore[attr-defined]


counted.shapes = []  # type: ignore[attr-defined]


class Listing(nn.Module):
    """Calls a function that keeps a list."""

    def forward(self, x: Tensor) -> Tensor:
        return counted(x)


def test_a_model_that_computes_with_what_a_function_collects_is_refused() -> None:
    """The list that hangs on the function is as it was afterwards."""
    with pytest.raises(whence.LostState, match=r"Listing changes counted\.shapes while it runs"):
        whence.capture(Listing(), (torch.ones(2),))
    assert counted.shapes == []  # type: ignore[attr-defined]


class Once(nn.Module):
    """Runs a single time."""

    used = False

    def forward(self, x: Tensor) -> Tensor:
        if self.used:
            raise RuntimeError("only once")
        self.used = True
        return x * 2


def test_a_model_that_cannot_run_again_is_refused() -> None:
    """A program of it would run a second time, where the model itself fails."""
    with pytest.raises(whence.LostState, match="Once changes used"):
        whence.capture(Once(), (X,))


@pytest.mark.parametrize("backward", [False, True])
def test_models_that_change_nothing_run_once(backward: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run is for models that change what they read."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last = 0

        def forward(self, x: Tensor) -> Tensor:
            print("ran")  # noqa: T201
            self.last = 1
            result: Tensor = self.linear(x)
            return result

    program = whence.capture(Plain(), (X,), backward=backward)
    assert (capsys.readouterr().out, program.guards.settled) == ("ran\n", None)


RUNS, SEEN, HELD = 0, list[int](), SimpleNamespace(total=torch.zeros(1))


class CountsAround(nn.Module):
    """Counts its runs around itself, in what `counts` says."""

    total = 0

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        global RUNS  # noqa: PLW0603
        match self.counts:
            case "RUNS":
                RUNS += 1
            case "SEEN":
                SEEN.append(1)
            case "HELD.total":
                HELD.total = HELD.total + 1
            case _:
                CountsAround.total += 1
        return x * 2


@pytest.mark.parametrize("counts", ["RUNS", "SEEN", "HELD.total", "CountsAround.total"])
def test_what_every_run_counts_around_the_model(counts: str) -> None:
    """A bound program does not leave it out silently, and a module of the program says that it does."""
    model = CountsAround(counts)
    program = whence.capture(model, (X,))
    expected = model(X)
    assert program.check(model, (X,)) == []
    with pytest.raises(whence.StaleCapture, match=f"the model changes {counts} when it runs"):
        program.bind(model)(X)
    with pytest.warns(UserWarning, match=f"each run of the model changes {counts}, which"):
        assert same_bits(program.module()(X), expected)


class Stack:
    """What is in use, as libraries keep it: another object with each use, in the end one like the first."""

    def __init__(self, used: list[str]) -> None:
        self.used = used


STACK = SimpleNamespace(state=Stack([]))


class Pushing(nn.Module):
    """Pushes and pops, as a context does."""

    def forward(self, x: Tensor) -> Tensor:
        before = STACK.state
        STACK.state = Stack([*before.used, "pushed"])
        result = x * len(STACK.state.used)
        STACK.state = Stack(STACK.state.used[:-1])
        return result


def test_a_copy_of_what_was_there_is_no_change() -> None:
    """The next run finds the same in it."""
    model = Pushing()
    bound = whence.capture(model, (X,)).bind(model)
    for _ in range(2):
        assert same_bits(bound(X), model(X))


class Holding(nn.Module):
    """Does `change` to a buffer that it has read."""

    def __init__(self, held: Tensor | None, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("held", held)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        held = getattr(self, "held", None)
        result = x if held is None else x * held
        self.change(self, x)
        return result


def _emptied(model: Any, _: Tensor) -> None:
    model.held = None


def _gone(model: Any, _: Tensor) -> None:
    if hasattr(model, "held"):
        del model.held


def _put(model: Any, x: Tensor) -> None:
    model.held = x.detach().sum(0)


@pytest.mark.filterwarnings("ignore:Holding kept tensors of the capture")
@pytest.mark.parametrize(
    ("held", "change"),
    [(torch.full((4,), 3.0), _emptied), (torch.full((4,), 3.0), _gone), (None, _put)],
    ids=["emptied", "deleted", "put"],
)
def test_buffer_that_comes_or_goes(held: Tensor | None, change: Callable[[Any, Tensor], None]) -> None:
    """The next run would find another thing in its place: that is refused, naming the buffer."""
    with pytest.raises(whence.LostState, match="Holding changes held while it runs"):
        whence.capture(Holding(held, change), (X,))


@pytest.mark.filterwarnings("ignore:Holding kept tensors of the capture")
def test_buffer_that_a_first_run_fills() -> None:
    """With the same in every run, it is a cache: the program holds before and after."""

    def fill(model: Any, _: Tensor) -> None:
        if model.held is None:
            model.held = torch.ones(4)

    model = Holding(None, fill)
    program = whence.capture(model, (X,))
    expected = model(X)
    assert program.check(model, (X,)) == []
    assert same_bits(program.bind(model)(X), expected)
    assert same_bits(model(X), expected)


class Remembering(nn.Module):
    """Makes a row when it first runs, and again for other sizes, dtypes or numbers."""

    def __init__(self, find: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.find = find
        self.row: Any = None
        self.last: Any = None
        self.made_for: Any = None

    def make(self, made_for: Any) -> None:
        """A row, and what it is for."""
        self.row, self.made_for = torch.arange(4.0), made_for

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x + self.find(self, x))
        return result


def _for_sizes(model: Any, x: Tensor) -> Tensor:
    if model.row is None or model.made_for != x.shape[1:]:
        model.make(x.shape[1:])
    return model.row


def _for_a_size(model: Any, x: Tensor) -> Tensor:
    if model.row is None or model.made_for != x.shape[1]:
        model.make(x.shape[1])
    return model.row


def _for_a_dtype(model: Any, x: Tensor) -> Tensor:
    if model.row is None or model.made_for != x.dtype:
        model.make(x.dtype)
    return model.row


def _unread(model: Any, x: Tensor) -> Tensor:
    if model.made_for != x.shape[1:]:
        model.make(x.shape[1:])
    return model.row


def _by_a_flag(model: Any, _: Tensor) -> Tensor:
    if not model.made_for:
        model.make(True)
    return model.row


def _beside_what_varies(model: Any, x: Tensor) -> Tensor:
    model.last = x.detach() * 2
    return _for_sizes(model, x)


FOUND = (_for_sizes, _for_a_size, _for_a_dtype, _unread, _by_a_flag, _beside_what_varies)


@pytest.mark.filterwarnings("ignore:Remembering kept tensors of the capture")
@pytest.mark.parametrize("find", FOUND, ids=lambda find: find.__name__.strip("_"))
def test_what_the_first_run_puts_the_next_one_may_read(find: Callable[[Any, Tensor], Tensor]) -> None:
    """Also what the first one did not read: for which sizes it made a cache, or the cache itself. A bound run
    leaves a model that eager can run."""
    model = Remembering(find)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    bound = program.bind(model)(X)
    expected = model(X)
    assert same_bits(bound, expected)
    assert program.check(model, (X,)) == []
    assert same_bits(program.bind(model)(X), expected)


@pytest.mark.filterwarnings("ignore:Remembering kept tensors of the capture")
def test_what_the_first_run_puts_of_its_arguments_is_refused() -> None:
    """The next one would compute with another call's numbers."""

    def find(model: Any, x: Tensor) -> Tensor:
        if model.made_for is None:
            model.row, model.made_for = x.detach().sum(0), True
        return model.row

    with pytest.raises(whence.LostState, match="changes made_for while it runs"):
        whence.capture(Remembering(find), (X,))

from collections.abc import Callable
from logging import getLogger
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import verified
from tests.tracing.failing import DATA_DEPENDENT, Doing, Failure


@pytest.fixture(params=DATA_DEPENDENT, ids=lambda failure: failure.name)
def failure(request: pytest.FixtureRequest) -> Failure:
    found: Failure = request.param
    return found


def refusal(model: Any, *args: Any) -> whence.DataDependent:
    """The error for a model that needs a value."""
    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(model, args or (torch.ones(2, 4),))
    return caught.value


def named(name: str) -> whence.DataDependent:
    """The error for one of the table's failures."""
    return refusal(next(f for f in DATA_DEPENDENT if f.name == name).model())


@pytest.mark.sample(5)
def test_value_needed(failure: Failure) -> None:
    """A Python decision that needs a tensor's value is refused, with the line, the reason and the remedy."""
    error = refusal(failure.model())
    assert error.where.line is not None and "failing.py" in error.where.line
    assert "shapes without numbers" in error.why
    assert error.remedy


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "asked", "remedy"),
    [
        ("if", "a branch (if, while", "torch.where(condition, a, b)"),
        ("equal", "torch.equal", "torch.where(condition, a, b)"),
        ("item", "a number (.item()", "keep it a tensor"),
        ("int", "a number (int())", "as a Python number"),
        ("range", "a number (an index, a slice or range())", "keep it a tensor"),
        ("size", "a number (an index, a slice or range())", "keep it a tensor"),
        ("nonzero", "nonzero, whose result has a size", "keep the size fixed"),
        ("mask", "indexing with a mask", "torch.where(mask, x, 0)"),
        ("unique", "unique, whose result has a size", "keep the size fixed"),
        ("numpy", "the content (.numpy())", "with torch functions"),
        ("tolist of a buffer", "the content (.tolist())", "move that part out"),
        ("dlpack", "the content (from_dlpack)", "move that part out"),
        ("pickled", "the content (pickled)", "move that part out"),
        ("address", "the address (.data_ptr())", "elsewhere in memory"),
        ("one memory", "the address (.is_set_to())", "elsewhere in memory"),
        ("memory", "the memory (.untyped_storage())", "elsewhere in memory"),
        ("memory of a parameter", "the memory (.storage())", "elsewhere in memory"),
        ("format", "the content (formatted as text)", "with torch functions"),
    ],
)
def test_value_read_in_the_user_s_words(name: str, asked: str, remedy: str) -> None:
    """The error speaks of what the user wrote, not of an operator inside torch, and has a remedy for it."""
    error = named(name)
    assert error.what.startswith(asked)
    assert remedy in error.remedy
    assert "_local_scalar_dense" not in str(error)


def test_value_needed_in_a_submodule_names_it() -> None:
    """The error names the module whose forward asked, by its path."""
    inner = next(f for f in DATA_DEPENDENT if f.name == "if").model()
    assert refusal(nn.Sequential(nn.ReLU(), inner)).where.module == "1"


class Router(nn.Module):
    """Decides by a score that another module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        score = self.score(x + bias)
        return x if score.sum() > 0 else -x


def test_value_is_traced_to_its_operation_and_its_inputs() -> None:
    """The error says which operation made the value, in which module and line, and from which inputs."""
    error = refusal(Router(), torch.ones(2, 4), torch.ones(4))
    assert "needs the value of gt" in error.what
    assert "gt: bool[] = aten.gt.Scalar(sum_1, 0)" in error.why
    assert "computed in module (root), at " in error.why
    assert "from the input `x` (args[0]), the input `bias` (args[1])" in error.why


def test_value_made_in_another_module_names_that_module() -> None:
    """Where the value was made and where it was needed are two places, and both are named."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.score(x).item() > 0 else -x

    error = refusal(Reading(), torch.ones(1, 4))
    assert error.where.module == ""
    assert "aten.linear.default" in error.why
    assert "computed in module score, at " in error.why


OUTSIDE = torch.ones(2)
SOURCES: dict[str, Callable[..., Any]] = {
    "the input `x` (args[0])": lambda m, x: m.linear(x) * x.numpy(),
    "the parameter linear.bias": lambda m, x: m.linear(x) * m.linear.bias.tolist()[0],
    "the buffer table": lambda m, x: m.linear(x) * m.table.tolist()[0],
    "a tensor from outside the model": lambda m, x: m.linear(x) if len(x[OUTSIDE > 0]) > 1 else x,
}


@pytest.mark.parametrize("described", SOURCES)
def test_value_of_an_input_is_named_as_one(described: str) -> None:
    """A value that nothing computed is an input, a parameter, a buffer, or comes from outside."""
    error = refusal(Doing(SOURCES[described]))
    assert described in error.what + error.why


def test_value_of_state_alone_names_the_state() -> None:
    """A value that no input leads to is said to come from the parameters."""
    assert (
        "from the parameter linear.bias"
        in refusal(Doing(lambda m, x: x if m.linear.bias.sum().item() > 0 else -x)).why
    )


def test_only_a_few_sources_are_named() -> None:
    """A value computed from many inputs names three of them, and says that there are more."""
    many = tuple(torch.ones(2) for _ in range(5))
    error = refusal(lambda a, b, c, d, e: a if (a + b + c + d + e).sum().item() > 0 else b, *many)
    assert "the input `c` (args[2]), …" in error.why
    assert "the input `d`" not in error.why


REMEDIES: dict[str, Callable[[Tensor], Tensor]] = {
    "choose": lambda x: torch.where(x.sum() > 0, x, -x),
    "keep the size": lambda x: torch.where(x > 0, x, 0),
    "mask": lambda x: x * (x > 0),
    "count": lambda x: x * (x > 0).sum(),
    "a fixed number": lambda x: torch.topk(x, 2).values,
    "index": lambda x: x[x.sum(1).long().clamp(0, 1)],
    "calculate": lambda x: x * x.sum() + (x.sum() > 3),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_remedies_are_captured(remedy: str) -> None:
    """What the errors tell people to write is captured, and equals eager."""
    x, followed = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]]), REMEDIES[remedy]
    assert whence.capture(followed, (x,)).verify(followed, (x,)).ok


def test_known_number_is_no_value() -> None:
    """A tensor made from a literal has a known value, which may be read."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * int(torch.tensor(3))

    program = whence.capture(scaled, (torch.ones(2),))
    assert program.verify(scaled, (torch.ones(2),)).ok


class AsksForItsFirst(nn.Module):
    """Does otherwise for the tensor that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.cos() if torch.equal(x, self.kept) else x.sin()


@pytest.mark.parametrize("backward", [False, True])
def test_tensors_of_other_shapes_are_not_equal(backward: bool) -> None:
    """`torch.equal` looks at no number where the shapes differ; where they do not, its answer is refused."""
    verified(AsksForItsFirst(), torch.ones(2, 4, requires_grad=True), backward=backward)
    assert refusal(AsksForItsFirst(), torch.ones(3, 4)).what.startswith("torch.equal")


def by_truth(x: Tensor) -> Tensor:
    """A branch."""
    return x.sin() if x.sum() > 0 else x.cos()


def by_number(x: Tensor) -> Tensor:
    """A number that decides."""
    return x * 2 if x.max().item() > 0.5 else x.exp()


RUNS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "the side that the example takes": lambda f, x: torch.cond(x.sum() > 0, f, torch.tanh, (x,)),
    "the other side": lambda f, x: torch.cond(x.sum() < 0, f, torch.tanh, (x,)),
    "map": lambda f, x: map_(lambda row, *_: f(row), x),
    "while_loop": lambda f, x: while_loop(
        lambda count, _: count < 3, lambda count, x: (count + 1, f(x)), (torch.tensor(0), x)
    )[1],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("decide", [None, "example"])
@pytest.mark.parametrize("backward", [False, lambda result: result.sum()], ids=["forward", "loss"])
@pytest.mark.parametrize("function", [by_truth, by_number])
@pytest.mark.parametrize("runs", RUNS)
def test_functions_that_an_operator_runs_decide_nothing(
    runs: str, function: Any, backward: Any, decide: str | None
) -> None:
    """The error has module, line, reason and a remedy that is not what was asked for already."""
    model, x = Doing(lambda m, x: RUNS[runs](function, m.linear(x))), torch.ones(2, 4)
    with pytest.raises(whence.DataDependent, match=f"in {function.__name__}") as caught:
        whence.capture(model, (x,), backward=backward, decide=decide)
    error = caught.value
    assert "the example takes one way through it, or none" in error.why
    assert 'the operator, which an example can decide with decide="example"' in error.remedy


@pytest.mark.parametrize("backward", [False, lambda result: result.sum()], ids=["forward", "loss"])
@pytest.mark.parametrize("function", [by_truth, by_number])
def test_python_in_the_place_of_the_operator_is_decided(function: Any, backward: Any) -> None:
    """What the error says to do works; so does a checkpoint, whose function decides as it does elsewhere."""
    written = Doing(lambda m, x: function(m.linear(x)) if m.linear(x).sum() > 0 else m.linear(x).tanh())
    checkpointed = Doing(lambda m, x: checkpoint(function, m.linear(x), use_reentrant=False))
    x = torch.ones(2, 4)
    for model in (written, checkpointed):
        program = whence.capture(model, (x,), backward=backward, decide="example")
        assert program.decisions and program.verify(model, (x,)).ok


def test_anomaly_mode_is_named() -> None:
    """What looks for NaN in every gradient is no line of the model's; its stacks alone are captured with."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(whence.DataDependent) as caught:
        whence.capture(model, (x,), backward=torch.sum)
    assert "anomaly mode" in caught.value.what
    assert "check_nan=False" in str(caught.value.remedy)
    assert 'decide="example"' in str(caught.value.remedy)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        program = whence.capture(model, (x,), backward=torch.sum)
    assert program.verify(model, (x,)).ok


class Written(nn.Module):
    """Decides by what it has written, or tells it to people."""

    count: Tensor
    rate: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("rate", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Named:
    """An object that writes a tensor where it is written."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __str__(self) -> str:
        return f"<{self.held}>"


def rated(rate: str, x: Tensor) -> Tensor:
    """Takes text as those do that tell people of it, and decides by it."""
    again = rate
    assert again, rate
    return x * 2 if again == "1.5" else x


def returned(rate: str) -> str:
    return rate


DECIDING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "f-string": lambda m, x: x * 2 if f"{m.rate}" == "1.5" else x,
    "f-string for a function": lambda m, x: rated(f"{m.rate}", x),
    "f-string for a function that gives it back": lambda m, x: x * len(returned(f"{m.rate}")),
    "part of an f-string": lambda m, x: x * len(f"rate {m.rate}"),
    "f-string of an input": lambda m, x: x * 2 if f"{x.sum()}" == "8.0" else x,
    "f-string with !r": lambda m, x: x * 2 if f"{m.count!r}" == "tensor(3)" else x,
    "str": lambda m, x: x * 2 if str(m.count) == "tensor(3)" else x,
    "repr": lambda m, x: x * 2 if "3" in repr(m.count) else x,
    "percent": lambda m, x: x * 2 if "%s" % m.count == "tensor(3)" else x,  # noqa: UP031
    "format": lambda m, x: x * 2 if format(m.count) == "3" else x,
    "str of a list": lambda m, x: x * 2 if str([m.count]) == "[tensor(3)]" else x,
    "str of an object": lambda m, x: x * 2 if str(Named(m.count)) == "<3>" else x,
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", DECIDING)
def test_what_is_decided_by_text_is_asked(name: str) -> None:
    """Without a format, too: the text of a fake tensor, or of a symbol, was compared."""
    x = torch.ones(2, 4)
    assert "text" in refusal(Written(DECIDING[name]), x).what
    model = Written(DECIDING[name])
    program = whence.capture(model, (x,), decide="example")
    assert program.verify(model, (x,)).ok
    model.count.fill_(5)
    model.rate.fill_(2)
    with pytest.raises(whence.StaleCapture, match="the content of"):
        program.module()(x + 1)


def printed(m: Any, x: Tensor) -> Tensor:
    print(m.count, f"{m.rate} {x.sum():.2f}", Named(x))  # noqa: T201
    return x * 2


def logged(m: Any, x: Tensor) -> Tensor:
    getLogger("whence.test").info("%s", m.rate)
    getLogger("whence.test").info(f"{x.mean():.3f} of {m.count}")
    return x * 2


def put_together_before(m: Any, x: Tensor) -> Tensor:
    message = f"rate {m.rate:.2f}"
    print(message)  # noqa: T201
    return x * 2


def asserted(m: Any, x: Tensor) -> Tensor:
    assert x.shape[0] == 2, f"{x:}"
    torch._assert(x.shape[0] == 2, f"{x.sum():.2f}")
    return x * 2


def required(holds: Any, message: str | Callable[[], str], error: type[Exception] = ValueError) -> None:
    """What libraries have around PyTorch's checks."""
    if not callable(message):

        def made() -> str:
            return message
    else:
        made = message
    torch._check_with(error, holds, made)


class Checks:
    @staticmethod
    def fits(holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(message)

    def holds(self, holds: bool, *, message: str = "") -> None:
        assert holds, message


def checked_elsewhere(m: Any, x: Tensor) -> Tensor:
    required(x.shape[0] == 2, f"rate {m.rate}, and {x.sum()}")
    Checks.fits(x.shape[0] == 2, f"rate {m.rate}")
    checks = Checks()
    checks.fits(x.shape[0] == 2, f"rate {m.rate:.2f}")
    checks.holds(x.shape[0] == 2, message=f"rate {m.rate}")
    return x * 2


@pytest.mark.parametrize("body", [printed, logged, put_together_before, asserted, checked_elsewhere])
@pytest.mark.parametrize("decide", [None, "example"])
def test_what_people_are_told_decides_nothing(body: Any, decide: Any) -> None:
    """A program prints nothing, and holds for other values; a capture prints what it has."""
    model, x = Written(body), torch.ones(2, 4)
    program = whence.capture(model, (x,), decide=decide)
    model.count.fill_(5)
    assert program.decisions == () and torch.equal(program.module()(x + 1), model(x + 1))


def test_a_size_made_of_tensors_is_decided_by_the_example() -> None:
    """C++ puts a TypeError of its own in the place of what we raise where it asks for the number."""

    def body(m: Any, x: Tensor) -> Tensor:
        return x.view(torch.Size([m.count - 1, 4]))

    model, x = Written(body), torch.ones(2, 4)
    program = whence.capture(model, (x,), decide="example")
    assert program.verify(model, (x,)).ok
    model.count.fill_(5)
    with pytest.raises(whence.StaleCapture, match="is 4, and was 2"):
        program.module()(x)

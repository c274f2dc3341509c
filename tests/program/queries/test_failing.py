"""Operations that fail in a program from a file: named, with their line, and still of PyTorch's kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.interop.archive.mutations import with_data
from tests.interop.archive.programs import X, content
from whence.captured import loaded
from whence.errors import CallError, FailedOperation
from whence.interop import bytes_of

IDS, FAR = torch.tensor([1, 2]), torch.tensor([1, 20])


class Table(nn.Module):
    """Rows of a table: which, arguments say."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids))


class Choosing(nn.Module):
    """The same in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = torch.cond(ids.sum() > 0, self.table, lambda ids: self.table(ids * 0), (ids,))
        return found


def summed(result: Tensor) -> Tensor:
    """A loss."""
    return result.sum()


def through_file(model: nn.Module, **options: Any) -> whence.Program:
    """A program that was read from a file, on the model's tensors."""
    return loaded(bytes_of(whence.capture(model, (IDS,), **options), weights=False), "p.whence", model)


RUNS: dict[str, Callable[[whence.Program, nn.Module], Any]] = {
    "run": lambda program, _: program.run((FAR,)),
    "first": lambda program, _: program.first((FAR,)),
    "module": lambda program, _: program.module()(FAR),
    "tree": lambda program, _: program.unflatten()(FAR),
    "guarded": lambda program, model: program.guarded(model)(FAR),
    "bound": lambda program, model: program.bind(model)(FAR),
    "pickled": lambda program, _: whence.captured.loaded(bytes_of(program, weights=True), "p.whence").run(
        (FAR,)
    ),
}


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("backward", [False, summed])
def test_the_operation_is_named(way: str, backward: Any) -> None:
    """With its call, line, PyTorch's words and the file, however it is run; and it is caught as before."""
    model = Table()
    program = through_file(model, backward=backward)
    with pytest.raises(IndexError, match="index out of range") as caught:
        RUNS[way](program, model)
    error = caught.value
    assert isinstance(error, FailedOperation) and isinstance(error.__cause__, IndexError)
    assert error.what.startswith("embedding of the program Table fails: index out of range in self")
    assert error.where.module == "tokens" and "test_failing.py" in str(error.where.line)
    assert error.why == "aten.embedding.default raised IndexError, and the program was read from p.whence"


@pytest.mark.parametrize("way", ["run", "module", "tree"])
def test_the_operation_of_a_branch_is_named(way: str) -> None:
    """By its own name, not that of the branch around it, where code says which it is."""
    model = Choosing()
    with pytest.raises(FailedOperation, match="index out of range") as caught:
        RUNS[way](through_file(model), model)
    assert caught.value.what.startswith("cond" if way == "run" else "embedding")


@pytest.mark.parametrize("way", [way for way in RUNS if way != "pickled"])
def test_a_program_of_this_process_raises_what_eager_does(way: str) -> None:
    """There the operation is the model's own."""
    model = Table()
    with pytest.raises(IndexError) as caught:
        RUNS[way](whence.capture(model, (IDS,)), model)
    assert type(caught.value) is IndexError


class Refusing(nn.Module):
    """Somebody's own module."""

    def forward(self, _: Tensor) -> Tensor:
        raise ValueError("not today")


def test_what_other_peoples_modules_raise_is_theirs() -> None:
    """In the place of a captured one."""
    tree = through_file(Table(), preserve_calls="head").unflatten()
    tree.set_submodule("head", Refusing())
    with pytest.raises(ValueError, match="not today") as caught:
        tree(IDS)
    assert type(caught.value) is ValueError


def test_errors_that_say_more_stay_what_they_are() -> None:
    """Whence's own, and classes of Python's kinds, as those of linear algebra and of memory."""
    with pytest.raises(CallError):
        through_file(Table()).module()(IDS.float())

    class Solving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    program = whence.capture(Solving(), (torch.eye(2),))
    with pytest.raises(torch.linalg.LinAlgError):
        loaded(bytes_of(program, weights=True), "p.whence").module()(torch.zeros(2, 2))


class Making(nn.Module):
    """Makes a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(3, 4)


def _results_swapped(data: Any) -> None:
    """The derivative of the first branch gives first what it gives second."""
    reads = data["graphs"][3]["reads"]
    reads[-3], reads[-2] = reads[-2], reads[-3]


def test_a_gradient_of_another_shape_is_named() -> None:
    """It would be an error of autograd's, outside of all that we run; values of a branch are not looked at
    when a file is loaded."""
    tree = loaded(with_data(content("branch, joint"), _results_swapped), "p.whence").unflatten()
    with pytest.raises(FailedOperation, match=r"p_inner_weight .* a gradient of \[3, 4\], and is \[4, 4\]"):
        tree(torch.ones(3, 4))[0].backward()


def _dimension_gone(data: Any) -> None:
    """What is asked for a size that data decide has none."""
    data["tables"]["values"][4]["tensor"] = 5


def _forms_swapped(data: Any) -> None:
    """A mask is among the arguments of a sum, and not of what reads by it."""
    forms = data["graphs"][0]["forms"]
    forms[2], forms[6] = forms[6], forms[2]


@pytest.mark.parametrize(
    ("changed", "change"),
    [(_dimension_gone, lambda p: p.decompose()), (_forms_swapped, lambda p: p.to(torch.float64))],
    ids=["decompose", "to"],
)
def test_passes_say_so_too(changed: Any, change: Any) -> None:
    """They run operators on fakes, of the shapes that the file says."""
    program = loaded(with_data(content("sizes of data"), changed), "p.whence")
    with pytest.raises(FailedOperation, match=r"read from p\.whence"):
        change(program)


def _pinned(data: Any) -> None:
    """Memory is asked for that a process without a graphics card has not."""
    for _, keywords in data["tables"]["forms"]:
        for pair in keywords:
            pair[1] = True if pair[0] == "pin_memory" else pair[1]


def _another_kind(data: Any) -> None:
    """The new value of a buffer is said to be its gradient."""
    kinds = data["signature"]["outputs"]["columns"]["kind"]
    kinds["at"][2] = kinds["distinct"].index("gradient")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            _pinned,
            "ones of the program Making fails: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="memory is pinned here"),
        ),
        (_another_kind, "a run of the program Sequential fails"),
    ],
)
def test_what_only_a_run_shows(change: Callable[[Any], None], words: str) -> None:
    """Where a file loads that says what no run can do, the error says that it was the file."""
    making = bytes_of(whence.capture(Making(), (X,)), weights=True)
    made = content("sizes") if change is _another_kind else making
    tree = loaded(with_data(made, change), "p.whence").unflatten()
    with pytest.raises(FailedOperation, match=r"read from p\.whence") as caught:
        tree(X)[0].backward()
    assert words in caught.value.what

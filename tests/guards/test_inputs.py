"""What a capture assumes of its inputs."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence


def _found(
    model: Any, example: tuple[Any, ...], given: tuple[Any, ...], *, backward: bool = False
) -> list[str]:
    """What a check of other inputs reports, by name."""
    program = whence.capture(model, example, backward=backward)
    assert program.check(model, example) == []
    return [violation.guard.what for violation in program.check(model, given)]


class Net(nn.Module):
    """Looks numbers up, and multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.table(ids)
        return result


IDS, X = torch.zeros(6, dtype=torch.int64), torch.ones(6, 4)


def test_layout_matters_where_a_kernel_may_choose_by_it() -> None:
    """A matrix product may add up in another order for another layout; a lookup may not."""
    strided = torch.zeros(12, dtype=torch.int64)[::2]
    assert _found(Net(), (IDS, X), (strided, X)) == []
    assert _found(Net(), (IDS, X), (IDS, torch.ones(4, 6).t()), backward=True) == ["args[1]"]


def test_layout_does_not_matter_to_a_forward() -> None:
    """It has the composites that choose, unless the model makes contiguous what leads there."""

    def gathered(x: Tensor) -> Tensor:
        return (x * 2).contiguous() @ x

    assert _found(Net(), (IDS, X), (IDS, torch.ones(4, 6).t())) == []
    assert _found(gathered, (torch.ones(4, 4),), (torch.ones(8, 4)[::2].t(),)) == ["args[0]"]


def test_layout_does_not_matter_to_elementwise_operations() -> None:
    """Each element is computed from its own, wherever it lies."""

    def scaled(x: Tensor) -> Tensor:
        return (x * 2).relu() + 1

    assert _found(scaled, (X,), (torch.ones(4, 6).t(),)) == []


def test_layout_matters_where_python_looks_at_it() -> None:
    """A branch on `is_contiguous` depends on the layout although its operations do not."""

    def branching(x: Tensor) -> Tensor:
        return x * 2 if (x + 1).is_contiguous() else x * 3

    assert _found(branching, (X,), (torch.ones(4, 6).t(),)) == ["args[0]"]


@pytest.mark.parametrize("size", [(1, 4), (4, 1)])
def test_stride_of_a_single_element_means_nothing(size: tuple[int, int]) -> None:
    """A dimension of size one has no stride to speak of."""
    example, other = torch.ones(size), torch.ones(size).as_strided(size, (7, 1) if size[0] == 1 else (1, 9))
    assert _found(nn.Softmax(1), (example,), (other,)) == []


def test_aliasing_of_inputs() -> None:
    """What was one tensor must stay one; two may become one only where nothing is written."""

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def written(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    y = torch.ones(6, 4)
    assert _found(added, (X, X), (X, y)) == ["args[0] and args[1]"]
    assert _found(added, (X, y), (X, X)) == []
    shared = ["the inputs, some of which are written,"]
    assert _found(written, (X, y), (y, y)) == shared
    whole = torch.ones(7, 4)
    assert _found(written, (X, y), (whole[:6], whole[1:])) == shared


def test_memory_that_unwritten_inputs_share_does_not_matter() -> None:
    """Nobody sees it who does not write there."""

    def written(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.add_(1)
        return x + y * z

    whole = torch.ones(7, 4)
    assert _found(written, (X, X + 1, X + 2), (X, whole[:6], whole[1:])) == []


MARK: Any = object()
IDENTITIES: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda x, y: x is y,
    "in a generator": lambda x, y: any(x is each for each in (y,)),
    "id": lambda x, y: id(x) == id(y),
    "hash": lambda x, y: hash(x) == hash(y),
}


@pytest.mark.parametrize("how", IDENTITIES)
def test_arguments_that_become_one_tensor(how: str) -> None:
    """Two tensors may be one in another call, unless code asks whether they are."""
    ask = IDENTITIES[how]

    def deciding(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if ask(x, y) else x + y * 3

    def adding(x: Tensor, y: Tensor) -> Tensor:
        return x + y * 3

    x, y = torch.ones(3), torch.ones(3)
    assert _found(deciding, (x, y), (x, x)) == ["which of the arguments are one tensor"]
    assert _found(adding, (x, y), (x, x)) == []


def test_whether_an_argument_is_a_tensor_of_a_variable_is_refused() -> None:
    """What stands for the argument is none that a variable holds; other objects are compared."""

    def deciding(x: Tensor) -> Tensor:
        return x * 2 if x is X else x * 3

    def sparing(x: Tensor) -> Tensor:
        return x * 2 if x is MARK else x * 3

    with pytest.raises(whence.SideEffect, match="whether it is the tensor `X`") as caught:
        whence.capture(deciding, (X,))
    assert "test_inputs.py" in str(caught.value.where)
    assert torch.equal(whence.capture(sparing, (X,)).module()(X), X * 3)


def test_constants_among_the_inputs() -> None:
    """A number, flag, text or None is compared by type and value."""

    def chosen(x: Tensor, times: float, mode: str, mask: Any) -> Tensor:
        return x * times if mode == "times" and mask is None else x

    example = (X, 2, "times", None)
    for position, other in ((1, 3), (1, 2.0), (1, True), (2, "plus"), (3, X), (3, False)):
        given: list[Any] = list(example)
        given[position] = other
        assert _found(chosen, example, tuple(given)) == [f"args[{position}]"]


def test_parameter_as_input() -> None:
    """An input may be a parameter where it was a tensor, as long as gradients are wanted alike."""
    frozen = nn.Parameter(torch.ones(6, 4), requires_grad=False)
    assert _found(nn.ReLU(), (X,), (frozen,)) == []
    assert _found(nn.ReLU(), (X,), (nn.Parameter(X),)) == ["args[0]"]


class Branching(nn.Module):
    """Does something else for another layout."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3


def test_a_layout_that_the_model_asked_for_is_checked_in_calls() -> None:
    """The branch that was recorded is that of the example's strides."""
    x = torch.randn(4, 4)
    program = whence.capture(Branching(), (x,))
    for module in (program.module(), program.unflatten()):
        with pytest.raises(
            whence.CallError, match=r"had strides \(4, 1\) at capture, has \(1, 4\); the model"
        ):
            module(x.t())
        assert torch.equal(module(x + 1), (x + 1) * 2)


def test_the_stride_of_a_single_element_decides_nothing_in_calls() -> None:
    """Memory is read along dimensions of several elements."""
    program = whence.capture(lambda x: x.as_strided((4,), (1,)) * 2, (torch.ones(1, 4),))
    other = torch.ones(1, 4).as_strided((1, 4), (7, 1))
    assert torch.equal(program.module()(other), torch.full((4,), 2.0))


def test_a_copy_of_any_layout_is_taken() -> None:
    """`contiguous` decides nothing: what comes is laid out as the example was."""

    class Copying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.contiguous() * 2

    x = torch.randn(4, 4)
    program = whence.capture(Copying(), (x,))
    assert torch.equal(program.module()(x.t()), x.t() * 2)


def _set_on(value: Any) -> Tensor:
    tensor = torch.ones(2, 4)
    tensor.flag = value  # type: ignore[attr-defined]
    return tensor


def _with_gradient() -> Tensor:
    tensor = torch.ones(2, 4, requires_grad=True)
    tensor.grad = torch.ones(2, 4)
    return tensor


def _retaining() -> Tensor:
    tensor = torch.ones(2, 4, requires_grad=True) * 1
    tensor.retain_grad()
    return tensor


PLAIN = partial(torch.ones, 2, 4)
TRAINED = partial(torch.ones, 2, 4, requires_grad=True)
QUESTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "args[0].is_leaf": (lambda x: x.is_leaf, TRAINED, lambda: TRAINED() * 1),
    "args[0]._version": (lambda x: x._version, PLAIN, lambda: PLAIN().add_(1)),
    "args[0].storage_offset": (lambda x: x.storage_offset(), PLAIN, lambda: torch.ones(3, 4)[1:]),
    "args[0]._base is None": (lambda x: x._base is None, PLAIN, lambda: PLAIN()[:]),
    "args[0]._is_view": (lambda x: x._is_view(), PLAIN, lambda: PLAIN()[:]),
    "args[0].grad is None": (lambda x: x.grad is None, TRAINED, _with_gradient),
    "args[0].retains_grad": (lambda x: x.retains_grad, lambda: TRAINED() * 1, _retaining),
    "args[0].output_nr": (
        lambda x: x.output_nr,
        lambda: TRAINED() * 1,
        lambda: TRAINED().tile(2, 1).split(2)[1],
    ),
    "args[0].is_shared": (lambda x: x.is_shared(), PLAIN, lambda: PLAIN().share_memory_()),
    "args[0].is_neg": (lambda x: x.is_neg(), PLAIN, lambda: torch._neg_view(PLAIN())),
    "type(args[0])": (lambda x: isinstance(x, nn.Parameter), TRAINED, lambda: nn.Parameter(PLAIN())),
    "hasattr(args[0], 'flag')": (lambda x: hasattr(x, "flag"), PLAIN, lambda: _set_on(1)),
    "args[0].flag": (lambda x: x.flag == 1, lambda: _set_on(1), lambda: _set_on(2)),
}


@pytest.mark.parametrize("what", QUESTIONS)
@pytest.mark.parametrize("turned", [False, True], ids=["as told", "the other way"])
def test_what_python_asks_of_an_argument(what: str, turned: bool) -> None:
    """The model hears of its argument what it hears in eager mode, and every call has to keep to that."""
    ask, *makes = QUESTIONS[what]
    first, second = (make() for make in (reversed(makes) if turned else makes))

    def deciding(x: Tensor) -> Tensor:
        return x * 2 if ask(x) else x * 3

    assert ask(first) != ask(second)
    found = _found(deciding, (first,), (second,))
    assert found == [what if what != "hasattr(args[0], 'flag')" or not turned else "args[0].flag"]
    program = whence.capture(deciding, (first,))
    result = program.verify(deciding, (first,))
    assert result.ok or what not in ("type(args[0])", "args[0].flag")
    assert result.ok is not bool(
        result.unlike
    )  # a copy that answers otherwise proves nothing, and blames none
    assert result.ok or ("NOT known" in str(result) and result.unlike[0] in str(result))
    assert torch.equal(program.bind(deciding)(first), deciding(first))
    for module in (program.module(), program.unflatten()):
        assert torch.equal(module(first), deciding(first))
        with pytest.raises(whence.CallError, match="the model asked for it"):
            module(second)


@pytest.mark.parametrize(
    ("made", "ask"),
    [
        (lambda: TRAINED() * 1, lambda x: x.grad_fn is None),
        (lambda: _set_on(torch.ones(4)), lambda x: x.flag),
    ],
    ids=["history", "tensor"],
)
def test_what_an_argument_brings_along(made: Callable[[], Tensor], ask: Callable[[Any], Any]) -> None:
    """A history, or a tensor that hangs on an argument, is no part of a program: looking at it is refused."""

    def looking(x: Tensor) -> Tensor:
        return x * 2 if ask(x) is not None else x

    with pytest.raises(whence.UnsupportedInput, match="which brings that along"):
        whence.capture(looking, (made(),))


def test_what_a_run_changes_of_an_argument_is_heard() -> None:
    """A write counts, and what is set to require a gradient does so, on top of what the argument was."""

    def writing(x: Tensor) -> Tensor:
        before = x._version
        x.add_(1)
        return x * (10 * before + x._version)

    given = PLAIN().add_(1).mul_(2)
    expected = writing(given)
    given = PLAIN().add_(1).mul_(2)
    assert torch.equal(whence.capture(writing, (given,)).bind(writing)(given), expected)


def test_attribute_of_an_argument_that_nobody_reads() -> None:
    """What hangs on an argument may be anything where code does not look for it."""
    assert _found(torch.sin, (_set_on(1),), (_set_on(2),)) == []
    assert _found(torch.sin, (_set_on(1),), (_set_on(torch.ones(4)),)) == []


def test_whether_an_argument_requires_a_gradient() -> None:
    """A module of a program takes both kinds, unless the model asks which it is given."""

    def asking(x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x * 3

    assert whence.capture(torch.sin, (PLAIN(),)).module()(TRAINED()).requires_grad
    program = whence.capture(asking, (PLAIN(),))
    assert [row.guard.what for row in program.check(asking, (TRAINED(),))] == ["args[0]"]
    with pytest.raises(whence.CallError, match=r"args\[0\]\.requires_grad was False at capture, is True"):
        program.module()(TRAINED())


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("given", [PLAIN, TRAINED])
def test_whether_anything_requires_a_gradient(given: Callable[[], Tensor], is_frozen: bool) -> None:
    """Where a parameter does, it does not matter whether an argument does; else it is a guard."""
    layer = nn.Linear(4, 4).requires_grad_(not is_frozen)

    def asking(x: Tensor, y: Tensor) -> Tensor:
        found = layer(x) + y
        return found * 2 if any(each.requires_grad for each in (x, y, *layer.parameters())) else found * 3

    program = whence.capture(asking, (given(), PLAIN()))
    guarded = program.guarded(asking, on_violation="recapture")
    for arguments in product((PLAIN(), TRAINED()), repeat=2):
        expected = asking(*arguments)
        assert torch.equal(guarded(*arguments), expected)
        if is_frozen and arguments[0].requires_grad is not given().requires_grad:
            assert "args[0]" in [row.guard.what for row in program.check(asking, arguments)]
        elif not is_frozen:
            assert torch.equal(program.module()(*arguments), expected)

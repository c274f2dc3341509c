"""What the model asks of tensors that it is given is checked in calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence

X = torch.ones(6, 4)
REQUIRING, CONJUGATE = torch.ones(6, 4, requires_grad=True), torch.complex(X, X)
ASKED: dict[str, tuple[Callable[[Tensor], bool], Tensor, Tensor]] = {
    "requires_grad": (lambda x: x.requires_grad, X, REQUIRING),
    "requires_grad no more": (lambda x: x.requires_grad, REQUIRING, X),
    "requires_grad of a value": (lambda x: (x * 2).requires_grad, X, REQUIRING),
    "grad_fn of a value": (lambda x: (x * 2).grad_fn is None, REQUIRING, X),
    "is_leaf": (lambda x: x.is_leaf, REQUIRING, REQUIRING * 2),
    "grad_fn": (lambda x: x.grad_fn is None, REQUIRING, REQUIRING * 2),
    "is_conj": (lambda x: x.is_conj(), CONJUGATE, CONJUGATE.conj()),
    "storage_offset": (lambda x: x.storage_offset() == 0, X, torch.ones(7, 4)[1:]),
    "storage_offset of a view": (
        lambda x: (x * 2)[1:].storage_offset() == x[1:].storage_offset(),
        X,
        torch.ones(7, 4)[1:],
    ),
    "stride": (lambda x: x.stride(0) == 1, torch.ones(1, 4), torch.ones(1, 4).as_strided((1, 4), (1, 1))),
    "stride of an open size": (lambda x: x.is_contiguous(), X, torch.ones(4, 6).t()),
}
"""A question to a tensor, an example, and another tensor of which the answer is another."""


class Asking(nn.Module):
    """Decides by what it is told of what comes in."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if self.asks(x) else x.cos()


@pytest.mark.parametrize("row", ASKED)
@pytest.mark.parametrize("depth", [1, 3])
def test_what_the_model_asked_of_an_argument_is_checked_in_calls(row: str, depth: int) -> None:
    """The branch that was recorded is that of the answer; a check and a call know the same of it."""
    asks, example, other = ASKED[row]
    layers = [nn.Sequential(Asking(asks), nn.Identity()) for _ in range(depth)]
    model = layers[0] if depth == 1 else Together(layers)
    sizes = ({0: torch.export.Dim.AUTO},) if "open" in row else None
    program = whence.capture(model, (example,), dynamic_shapes=sizes)
    assert program.check(model, (example,)) == []
    (violation,) = program.check(model, (other,))
    assert violation.guard.what.startswith("args[0]")
    assert violation.found != str(violation.guard.expected)
    for run in (program.module(), program.unflatten()):
        assert torch.equal(run(example), model(example))
        with pytest.raises(whence.CallError, match="the model asked for"):
            run(other)


class Together(nn.Module):
    """Hands each of its layers the same."""

    def __init__(self, layers: list[nn.Sequential]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = sum(layer(x) for layer in self.layers)
        return result


@pytest.mark.parametrize(
    "asks", [lambda y: y.requires_grad, lambda y: y.detach().requires_grad], ids=["parameter", "detached"]
)
def test_an_answer_that_no_argument_decides_is_asked_of_none(asks: Callable[[Tensor], bool]) -> None:
    """What comes of a parameter requires a gradient whatever comes in."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y.sin() if asks(y) else y.cos()

    model = Inner()
    program = whence.capture(model, (X,))
    for run in (program.module(), program.unflatten()):
        assert torch.equal(run(REQUIRING), model(REQUIRING))


@pytest.mark.parametrize("are_trained", [True, False])
def test_an_encoder_asks_arguments_and_parameters(are_trained: bool) -> None:
    """A parameter that requires a gradient answers for all; of a frozen encoder arguments decide."""
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(are_trained)
    x = torch.randn(2, 3, 8)
    run = whence.capture(model, (x,)).module()
    assert torch.equal(run(x), model(x))
    requiring = x.clone().requires_grad_()
    if are_trained:
        assert torch.equal(run(requiring), model(requiring))
    else:
        with pytest.raises(whence.CallError, match="requires_grad was False"):
            run(requiring)


def test_attention_asks_arguments_and_parameters() -> None:
    """By a function of its own, with the same answer."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.attention(x, x, x)[0]
            return found

    model, x = Attending().eval(), torch.randn(2, 3, 8)
    run = whence.capture(model, (x,)).module()
    requiring = x.clone().requires_grad_()
    assert torch.equal(run(requiring), model(requiring))


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.is_leaf,
        lambda x: x.grad_fn is None,
        lambda x: hasattr(x, "mask"),
        lambda x: isinstance(x, nn.Parameter),
    ],
    ids=["is_leaf", "grad_fn", "hasattr", "class"],
)
def test_compilers_read_what_is_asked(asks: Callable[[Tensor], bool]) -> None:
    """Dynamo takes a module of the program in one piece."""
    model = Asking(asks)
    program = whence.capture(model, (X,))
    assert program.convention.questions
    compiled = torch.compile(program.module(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), model(X))


LAID_OUT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[str]]] = {
    "nothing made contiguous": (lambda x, y: (x + y).sin(), []),
    "one of two": (lambda x, y: (x * 2).contiguous() + y, ["x"]),
    "what was not contiguous": (lambda x, y: (x * 2).t().contiguous() + y.t(), []),
    "in a format": (lambda x, y: x + y.clone().to(memory_format=torch.contiguous_format), ["y"]),
    "rows of both": (lambda x, y: torch.vmap(lambda row: row.contiguous().sin())(x) + y, ["x", "y"]),
    "statistics of training": (lambda x, y: F.batch_norm(x + y, None, None, training=True), []),
}
"""A model of two arguments, and those that have to lie as at capture."""


@pytest.mark.parametrize("name", LAID_OUT)
def test_arguments_that_are_laid_out(name: str) -> None:
    """Those that lead to what the model makes contiguous, which was so; all where gradients are, too."""
    function, expected = LAID_OUT[name]

    def model(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    convention = whence.capture(model, (X, X.clone())).convention
    assert {*convention.paths} - convention.any_layout == {f"args[{'xy'.index(each)}]" for each in expected}
    joint = whence.capture(model, (X.clone().requires_grad_(), X), backward=True)
    assert joint.convention.any_layout == frozenset()


class LooksIntoMemory(nn.Module):
    """Looks at a complex argument by its strides, and at a half of each number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((2, 4), (1, 3)) * self.weight * x.imag.sum()


def of_loss(result: Tensor) -> Tensor:
    return (result * torch.arange(8.0).reshape(2, 4)).abs().pow(1.5).sum()


@pytest.mark.parametrize("sizes", [None, {"x": {0: torch.export.Dim.AUTO}}], ids=["numbers", "open"])
@pytest.mark.parametrize("backward", [False, True, of_loss], ids=["forward", "joint", "loss"])
def test_an_argument_may_stand_for_the_conjugate_of_what_lies_in_memory(sizes: Any, backward: Any) -> None:
    """Its gradient, and that of what it meets, are eager's; one that stands for itself is another."""
    torch.manual_seed(0)
    model, kept = LooksIntoMemory(), torch.randn(4, 3, dtype=torch.complex64).t()
    example = kept.conj().requires_grad_()
    program = whence.capture(model, (example,), backward=backward, dynamic_shapes=sizes)
    result = program.verify(model, (example,))
    assert result.ok, str(result)
    with pytest.raises(whence.CallError, match=r"is_conj was True at capture"):
        program.module()(kept.clone().requires_grad_())


class Weighing(nn.Module):
    """Convolves several times with weights of their own, and does something else with them."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WeighingLayer(what) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return [layer(x) for layer in self.layers]


class WeighingLayer(nn.Conv2d):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 4, 3)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.what(self.weight)


WEIGHED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "no more": (lambda _: 0, 0),
    "flattened": (lambda weight: weight.flatten(1).sum(1), 0),
    "asked": (lambda weight: weight.sum() if weight.is_contiguous() else weight.sum() * 2, 3),
    "made contiguous": (lambda weight: weight.contiguous() * 2, 3),
    "looked into": (lambda weight: weight.as_strided((2, 2), (1, 1)) * 2, 3),
}


@pytest.mark.parametrize("row", WEIGHED)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
def test_parameters_may_lie_otherwise_where_nothing_was_decided_by_it(row: str, backward: bool) -> None:
    """A forward program of them is eager's then, bound too; a pass has decided, and so has a joint one."""
    what, count = WEIGHED[row]
    model, x = Weighing(what), torch.randn(2, 4, 6, 6)
    program = whence.capture(model, (x,), backward=backward)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert len(program.check(model, (x,))) == (3 if backward else count)
    assert len(program.decompose().check(model, (x,))) == 3
    if not (backward or count):
        expected = torch.utils._pytree.tree_leaves(model(x))
        for run in (program.module(), program.unflatten(), program.bind(model)):
            found = torch.utils._pytree.tree_leaves(run(x))
            tensors = [pair for pair in zip(found, expected, strict=True) if isinstance(pair[0], Tensor)]
            assert all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in tensors)


class Differentiating(nn.Module):
    """Returns a value, and the gradients of it for what `wanted` picks."""

    def __init__(self, wanted: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.wanted, self.linear = wanted, nn.Linear(4, 4)
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        value = (self.linear(x) * self.scale).sin().sum()
        return value, *torch.autograd.grad(value, self.wanted(self, x), create_graph=True)


WANTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear.weight": lambda m, _: m.linear.weight,
    "scale": lambda m, _: m.scale,
    "x": lambda _, x: x,
}


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


@pytest.mark.parametrize("name", WANTED)
def test_hooks_on_gradients_that_a_forward_asks_for_are_seen(name: str) -> None:
    """Eager calls them, and a program does not: those put there later were no violation."""
    model, x = Differentiating(WANTED[name]), torch.ones(2, 4, requires_grad=True)
    program = whence.capture(model, (x,))
    model.linear.bias.register_hook(doubled)  # whose gradient nobody asks for
    assert program.verify(model, (x,)).ok and program.check(model, (x,)) == []
    hooked = WANTED[name](model, x)
    handle = hooked.register_hook(doubled)
    assert [str(found) for found in program.check(model, (x,)) if "hooks" in str(found)]
    with pytest.raises(whence.errors.UnsupportedHook, match=r"the gradient of .*, on which is .*doubled"):
        whence.capture(model, (x,))
    handle.remove()
    assert program.check(model, (x,)) == []

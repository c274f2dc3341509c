"""Another module in the place of a preserved one, in a captured backward: its gradients are eager's bits."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import whence
from tests.checks import differing, gradients
from tests.hierarchy.test_preserve import WIDTH, X, newcomer
from whence.hierarchy.pieces import Pieces, added, whole
from whence.provenance import ModulePath

BOTH = pytest.mark.parametrize("backward", [True, lambda y: y.square().sum()], ids=["tangents", "loss"])


class Residual(nn.Module):
    """Hands the gradient of its result on to its argument as it got it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Shift(nn.Module):
    """Hands it on to a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Many(nn.Module):
    """Uses its argument several times, so that the gradient arrives in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * x.sigmoid() + self.second(x + 1) * x.tanh() + self.first(x.cos())


class Swapped(nn.Module):
    """Other uses of the argument before, after and around the call."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), inner()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        early = hidden.sin()
        return hidden + self.inner(hidden) * early + hidden.exp()


class Nested(nn.Module):
    """A residual around a preserved residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@BOTH
@pytest.mark.parametrize("inner", [Residual, Shift, Many, Nested])
def test_argument_with_other_uses(inner: Callable[[], nn.Module], backward: Any) -> None:
    """The original and the newcomer hand on gradients, or give them in pieces: sums are in eager's order."""
    check(Swapped(inner), "inner", backward)


@BOTH
def test_both_of_two_nested_calls(backward: Any) -> None:
    """The argument goes through unchanged at two levels."""
    check(Swapped(Nested), "inner.inner", backward)


@BOTH
@pytest.mark.parametrize("other", [Residual, Shift, Many, nn.Identity])
def test_newcomer_of_another_class(other: Callable[[], nn.Module], backward: Any) -> None:
    """What the original hands on is the newcomer's to give."""
    for inner in (Residual, Shift, Many):
        check(Swapped(inner), "inner", backward, other())


def check(model: nn.Module, path: str, backward: Any, new: nn.Module | None = None) -> None:
    """The tree with a newcomer leaves behind what the eager model with it does."""
    new, x = new or newcomer(model, path), X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=backward, preserve_calls=path).unflatten(copy=True)
    tree.set_submodule(path, new)
    eager = deepcopy(model)
    eager.set_submodule(path, deepcopy(new))
    assert differing(left_by(eager, loss=None), left_by(tree, loss=callable(backward))) == []


def left_by(module: nn.Module, *, loss: bool | None) -> dict[str, Any]:
    """The gradients of one run."""
    x = X.clone().requires_grad_()
    result = module(x)
    (result[0] if loss else result.square().sum()).backward()
    return {"x": x.grad, **gradients(module)}


def gpt2() -> nn.Module:
    """A model whose blocks are residuals."""
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=60, n_positions=32, use_cache=False,
                   bos_token_id=0, eos_token_id=0)
    ).eval()  # fmt: skip


def bert() -> nn.Module:
    """A model whose blocks end in a norm."""
    return BertModel(
        BertConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=60
        )
    ).eval()


@pytest.mark.parametrize(
    ("make", "pattern", "path"),
    [
        (gpt2, "transformer.h.*", "transformer.h.1"),
        (gpt2, "transformer.h.1", "transformer.h.1"),
        (gpt2, "transformer.h.1.mlp", "transformer.h.1.mlp"),
        (bert, "encoder.layer.*", "encoder.layer.0"),
        (bert, "encoder.layer.2.attention.output", "encoder.layer.2.attention.output"),
    ],
)
def test_blocks_of_transformers(make: Callable[[], nn.Module], pattern: str, path: str) -> None:
    """A block of the same class with other weights: loss and all gradients, replayed and not."""
    torch.manual_seed(0)
    model, ids = make(), torch.arange(12).reshape(2, 6)

    def loss(outputs: Any) -> Tensor:
        return outputs[0].square().mean()

    new = newcomer(model, path)
    eager = deepcopy(model)
    eager.set_submodule(path, deepcopy(new))
    loss(eager(ids)).backward()
    for reuse in (True, False):
        program = whence.capture(model, (ids,), backward=loss, preserve_calls=pattern, reuse=reuse)
        assert program.verify(model, (ids,)).ok
        tree = program.unflatten(copy=True)
        tree.set_submodule(path, deepcopy(new))
        tree(ids)[0].backward()
        assert differing(gradients(eager), gradients(tree)) == []


def test_replay_tells_calls_apart_by_what_is_preserved_in_them() -> None:
    """One layer of several is preserved: the others are not like it."""
    model, ids = gpt2(), torch.arange(12).reshape(2, 6)
    program = whence.capture(model, (ids,), backward=lambda o: o[0].sum(), preserve_calls="transformer.h.1")
    assert program.verify(model, (ids,)).ok
    own = [
        str(program.where(node).calls[0].path)
        for node in program.select("** :: aten.alias.default :: backward")
    ]
    assert [path for path in own if path.startswith("transformer.h.1")]
    assert not [path for path in own if path.startswith(("transformer.h.0", "transformer.h.2"))]


def test_pieces_are_added_one_by_one() -> None:
    """To what is there before; otherwise they are their sum."""
    total, first, second = torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1e-3])
    pieces = Pieces([first, second])
    assert torch.equal(torch.ops.aten.add.Tensor(total, pieces), total + first + second)
    assert not torch.equal(total + first + second, total + (first + second))
    assert torch.equal(torch.ops.aten.mul.Tensor(pieces, 2), (first + second) * 2)
    assert torch.equal(added(None, pieces), first + second)
    assert torch.equal(added(total, first), total + first)
    assert whole(total) is total


class Applies(nn.Module):
    """Calls what it is given."""

    def forward(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x).tanh()


class Given(nn.Module):
    """One module under two names, which another module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.applies = nn.Linear(WIDTH, WIDTH), Applies()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.applies(self.first, x))


class TwoNames(nn.Module):
    """One module under two names, each read as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("backward", [False, True])
def test_one_of_several_names_that_nobody_saw(backward: bool) -> None:
    """Which calls a newcomer under one name takes is not known: refused; all names together are eager's."""
    torch.manual_seed(0)
    model = Given()
    program = whence.capture(model, (X,), backward=backward, preserve_calls=["first", "second"])
    assert [(str(call.site), call.others) for call in program.calls if call.others] == [
        ("first", (ModulePath(("second",)),))
    ]
    new = nn.Linear(WIDTH, WIDTH)
    half, whole_tree, eager = program.unflatten(copy=True), program.unflatten(copy=True), deepcopy(model)
    half.set_submodule("first", new)
    with pytest.raises(whence.CallError, match=r"were one module, and another took first alone"):
        half(X)
    for path in ("first", "second"):
        whole_tree.set_submodule(path, new)
        eager.set_submodule(path, new)
    assert torch.equal(whole_tree(X), eager(X))


def test_one_of_two_names_that_were_read() -> None:
    """Each call is known by its name, and a newcomer takes those of its own."""
    torch.manual_seed(0)
    model, new = TwoNames(), nn.Linear(WIDTH, WIDTH)
    program = whence.capture(model, (X,), preserve_calls=["first", "second"])
    assert not [call for call in program.calls if call.others]
    tree = program.unflatten(copy=True)
    tree.set_submodule("first", new)
    model.set_submodule("first", new)
    assert torch.equal(tree(X), model(X))

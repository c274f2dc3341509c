"""Another module in the place of a preserved one, in a captured backward: its gradients are eager's bits."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import whence
from tests.checks import differing, gradients
from tests.hierarchy.swap.test_preserved import WIDTH, X, newcomer
from whence._torch.autograd.switches import switches
from whence.hierarchy.run.gradient_pieces import Piece, Pieces, joined, whole
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


@pytest.mark.sample(3)
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


@pytest.mark.sample(2)
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


def test_replay_of_layers_whatever_is_preserved_in_them() -> None:
    """Gradients are nodes of their own everywhere, so equal layers stay equal."""
    model, ids = gpt2(), torch.arange(12).reshape(2, 6)
    for pattern in ("transformer.h.1", "transformer.h.2.mlp"):
        program = whence.capture(model, (ids,), backward=lambda o: o[0].sum(), preserve_calls=pattern)
        assert program.verify(model, (ids,)).ok
        replayed = {row.type: row.replayed for row in program.replay.rows}
        assert replayed["GPT2Block"] == 2


def test_pieces_are_added_in_the_order_of_arrival() -> None:
    """Whoever joined them."""
    total, first, second = torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1e-3])
    pieces = Pieces((Piece(first, 5), Piece(second, 5)))
    assert torch.equal(whole(joined(total, 4, pieces, 6)), total + first + second)
    assert torch.equal(whole(joined(pieces, 0, total, 6)), first + second + total)
    assert not torch.equal(total + first + second, first + second + total)
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


class Strided(nn.Module):
    """Its result lies in memory in another order than a linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).T.contiguous().T


class Wrapped(nn.Module):
    """A low-rank update of a module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.update = base, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.update(x)


class Hooked(nn.Linear):
    """Changes the gradient of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 3)
        return super().forward(x)


class Borrowed(nn.Module):
    """Reads a parameter that it does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Parameter(torch.randn(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held[0]


class HalfInside(nn.Module):
    """Calls a module under autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), Residual()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(self.before(x)).float()


@BOTH
def test_result_in_another_layout(backward: Any) -> None:
    """It is laid out as the graph expects it, and keeps its history."""
    check(Swapped(lambda: nn.Linear(WIDTH, WIDTH)), "inner", backward, Strided())


@BOTH
def test_wrapper_around_the_captured_module(backward: Any) -> None:
    """What the captured module inside hands on arrives in the pieces that eager has."""
    model = Swapped(Many)
    x = X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=backward, preserve_calls="inner").unflatten(copy=True)
    wrapped = Wrapped(model.inner)
    eager = deepcopy(model)
    eager.inner = deepcopy(wrapped)
    wrapped.base = tree.get_submodule("inner")
    tree.set_submodule("inner", wrapped)
    assert differing(left_by(eager, loss=None), left_by(tree, loss=callable(backward))) == []


@BOTH
def test_under_autocast_of_the_model_itself(backward: Any) -> None:
    """A newcomer runs under what was on where it is called."""
    check(HalfInside(), "inner", backward)


class PlainAttention(nn.Module):
    """Calls a module where only the plain kernel of attention is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Attends(), Attends()

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            x = self.inner(x)
        return self.other(x)


class Attends(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).reshape(1, 1, 3, -1).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query * 3, key, value).reshape(x.shape)


@BOTH
@pytest.mark.parametrize("path", ["inner", "other"])
def test_where_the_model_turned_a_switch(path: str, backward: Any) -> None:
    """A newcomer runs as the original ran, and the switch is as it was afterwards."""
    before = switches()
    check(PlainAttention(), path, backward)
    tree = whence.capture(PlainAttention(), (X,), preserve_calls=path).unflatten(copy=True)
    kernels: list[bool] = []
    new = Attends()
    new.register_forward_hook(lambda *_: kernels.append(torch.backends.cuda.flash_sdp_enabled()))
    tree.set_submodule(path, new)
    tree(X)
    assert kernels == [path == "other"]
    assert switches() == before


@pytest.mark.parametrize(
    ("new", "why"), [(Hooked(WIDTH, WIDTH), "a hook on"), (Borrowed(), "does not register")]
)
def test_what_has_no_place_is_refused(new: nn.Module, why: str) -> None:
    """A hook that sees a part of a gradient; a parameter that nobody would hand a gradient."""
    x = X.clone().requires_grad_()
    tree = whence.capture(Swapped(Residual), (x,), backward=True, preserve_calls="inner").unflatten(copy=True)
    tree.set_submodule("inner", new)
    with pytest.raises(whence.CallError, match=why):
        tree(x)


def test_error_of_a_newcomer_names_its_place() -> None:
    """It is the newcomer's own."""
    tree = whence.capture(Swapped(Residual), (X,), preserve_calls="inner").unflatten(copy=True)
    tree.set_submodule("inner", nn.Linear(WIDTH + 1, WIDTH))
    with pytest.raises(RuntimeError) as raised:
        tree(X)
    assert raised.value.__notes__ == ["whence was running the Linear in the place of inner"]


def test_in_inference_mode() -> None:
    """Nothing counts versions there."""
    model, new = Swapped(Residual), Residual()
    tree = whence.capture(model, (X,), backward=True, preserve_calls="inner").unflatten(copy=True)
    tree.set_submodule("inner", new)
    model.inner = new
    with torch.inference_mode():
        assert torch.equal(tree(X), model(X))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_untied_weights_are_refused() -> None:
    """A captured backward has one gradient for both; a forward goes on, as autograd does the rest."""
    model = Tied()
    joint, forward = (whence.capture(model, (X,), backward=b).unflatten(copy=True) for b in (True, False))
    for tree in (joint, forward):
        tree.get_submodule("second").weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    assert forward(X).shape == X.shape
    with pytest.raises(whence.CallError, match=r"first.weight and second.weight were one tensor at capture"):
        joint(X)


class Enables(nn.Linear):
    """Records gradients whatever is on around it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


class Frozen(nn.Module):
    """Calls a module without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        with torch.no_grad():
            target = self.inner(hidden)
        return hidden.sin() + target


class Ignores(nn.Linear):
    """Takes an argument and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.ones_like(x))


def test_newcomer_that_records_where_the_original_did_not() -> None:
    """Eager would train it."""
    tree = whence.capture(Frozen(), (X,), backward=True, preserve_calls="inner").unflatten(copy=True)
    tree.set_submodule("inner", nn.Linear(WIDTH, WIDTH))
    tree(X).sum().backward()
    assert tree.get_submodule("inner").weight.grad is None
    tree.set_submodule("inner", Enables(WIDTH, WIDTH))
    with pytest.raises(whence.CallError, match="its result carries a gradient"):
        tree(X)


def test_newcomer_that_ignores_its_argument() -> None:
    """What led to it alone would get zeros, and gets nothing in eager; with other uses both are the same."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    tree = whence.capture(model, (X,), backward=True, preserve_calls="1").unflatten(copy=True)
    tree.set_submodule("1", Ignores(WIDTH, WIDTH))
    result = tree(X)
    with pytest.raises(whence.NotDifferentiable, match="gets no gradient, which the new module ignores"):
        result.sum().backward()
    check(Swapped(Residual), "inner", True, Ignores(WIDTH, WIDTH))

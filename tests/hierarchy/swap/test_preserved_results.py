"""A newcomer that returns what it was given: what reaches its result reaches its argument, in eager order."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from transformers import LlamaConfig, LlamaForCausalLM

import whence
from tests.checks import differing, gradients
from tests.hierarchy.swap.test_newcomers import BOTH, Frozen, bert, check, gpt2, left_by
from tests.hierarchy.swap.test_preserved import WIDTH, X


class Interleaved(nn.Module):
    """Uses an argument and a result of the inner module in turn, so that their gradients arrive in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x).tanh()
        result = self.inner(hidden)
        terms = [use((hidden, result)[at % 2]).sin() for at, use in enumerate(self.uses)]
        return result + torch.stack(terms).sum(0) * hidden


class Pair(nn.Module):
    """Returns two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden, hidden.cos()


class Detaching(Pair):
    """Returns one of them without a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, other = super().forward(x)
        return hidden, other.detach()


class Doubled(Pair):
    """Returns one value twice, or a value and its argument."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        return {"same": (hidden, hidden), "argument": (x, hidden), "both": (x, x)}[self.second]


class Once(Pair):
    """Returns one value twice at capture."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden, hidden


class AroundPair(nn.Module):
    """Uses both results and the argument in turn."""

    def __init__(self, inner: Callable[[], nn.Module] = Pair) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), inner()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        first, second = self.inner(hidden)
        mixed = first.sin() * second.cos() + first.exp() * hidden
        return mixed + second.tanh() + first.sigmoid() + hidden.cos()


class Scaled(nn.Module):
    """Returns a value that equals its argument, and depends on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def llama(attention: str = "sdpa") -> nn.Module:
    """A model whose norms are followed by several uses."""
    return LlamaForCausalLM(
        LlamaConfig(attn_implementation=attention,
                    num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4,
                    vocab_size=60, use_cache=False)
    ).eval()  # fmt: skip


@BOTH
def test_gradients_that_arrive_in_turn(backward: Any) -> None:
    """Those of the result are added between those of the argument."""
    check(Interleaved(), "inner", backward, nn.Identity())


@BOTH
@pytest.mark.parametrize("second", ["same", "argument", "both"])
def test_one_of_two_results(second: str, backward: Any) -> None:
    """Results that are one tensor, or the argument, beside each other."""
    check(AroundPair(), "inner", backward, Doubled(second))


@BOTH
def test_newcomers_one_after_the_other(backward: Any) -> None:
    """The argument goes through several of them."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.append(Interleaved())
    x = X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=backward, preserve_calls=["*", "*.inner"]).unflatten(
        copy=True
    )
    eager = deepcopy(model)
    for path in ("2", "3", "5.inner"):
        tree.set_submodule(path, nn.Identity())
        eager.set_submodule(path, nn.Identity())
    assert differing(left_by(eager, loss=None), left_by(tree, loss=callable(backward))) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "pattern", "paths"),
    [
        (gpt2, "**.ln_*", ["transformer.h.0.ln_1", "transformer.h.1.ln_2", "transformer.ln_f"]),
        (llama, "**.*norm", ["model.layers.1.input_layernorm", "model.layers.2.post_attention_layernorm"]),
        (llama, "model.layers.*", ["model.layers.0", "model.layers.1"]),
        (llama, "**.mlp", ["model.layers.1.mlp"]),
        (bert, "**.LayerNorm", ["encoder.layer.0.output.LayerNorm", "embeddings.LayerNorm"]),
    ],
)
def test_parts_of_transformers_that_are_left_out(
    make: Callable[[], nn.Module], pattern: str, paths: list[str]
) -> None:
    """Norms and whole layers become identities: loss and all gradients, replayed and not."""
    torch.manual_seed(0)
    model, ids = make(), torch.arange(12).reshape(2, 6)

    def loss(outputs: Any) -> Tensor:
        return outputs[0].square().mean()

    eager = deepcopy(model)
    for path in paths:
        eager.set_submodule(path, LeftOut())
    loss(eager(ids)).backward()
    for reuse in (True, False):
        program = whence.capture(model, (ids,), backward=loss, preserve_calls=pattern, reuse=reuse)
        assert program.verify(model, (ids,)).ok
        tree = program.unflatten(copy=True)
        for path in paths:
            tree.set_submodule(path, LeftOut())
        tree(ids)[0].backward()
        assert differing(gradients(eager), gradients(tree)) == []


class LeftOut(nn.Module):
    """Returns its first argument."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "new", "why"),
    [
        (AroundPair(Detaching), Pair(), "gave detach without a gradient"),
        (AroundPair(Once), Pair(), "value 1 of its result is a tensor of its own"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()), Scaled(), "was an argument at capture"),
    ],
)
def test_what_the_graph_cannot_tell(model: nn.Module, new: nn.Module, why: str) -> None:
    """A gradient that was cut, two values that were one, and a value that was the argument."""
    for backward in (True, False):
        tree = whence.capture(model, (X,), backward=backward, preserve_calls=["*"]).unflatten(copy=True)
        tree.set_submodule("1" if isinstance(model, nn.Sequential) else "inner", new)
        if backward or "gradient" not in why:
            with pytest.raises(whence.CallError, match=why):
                tree(X)


def test_argument_handed_on_where_nothing_recorded() -> None:
    """In eager mode the gradient goes on through it, and not through the original."""
    for backward in (True, False):
        tree = whence.capture(Frozen(), (X,), backward=backward, preserve_calls="inner").unflatten(copy=True)
        tree.set_submodule("inner", nn.Identity())
        with pytest.raises(whence.CallError, match="its result carries a gradient"):
            tree(X)


def test_gradients_that_a_pass_merged() -> None:
    """Equal nodes are one after it: a newcomer that hands a value on is refused, and another trains."""
    model, ids, path = gpt2(), torch.arange(12).reshape(2, 6), "transformer.h.1.ln_1"
    program = whence.capture(model, (ids,), backward=lambda o: o[0].square().mean(), preserve_calls=path)
    with program.track("cse") as edit:
        result = CSEPass()(edit.graph_module)
        assert result is not None
        edit.graph_module = result.graph_module
    program = edit.program
    tree = program.unflatten(copy=True)
    tree.set_submodule(path, nn.LayerNorm(32))
    tree(ids)[0].backward()
    tree.set_submodule(path, nn.Identity())
    with pytest.raises(whence.CallError, match="nothing says when alias_10 arrive"):
        tree(ids)


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, width = base, 32
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.base(x) + self.up(self.down(x)) * 0.5
        return hidden


def test_adapters_on_a_frozen_base() -> None:
    """Captured while the base required gradients; the adapters are trained, and nothing else."""
    torch.manual_seed(0)
    model, ids = llama(), torch.arange(12).reshape(2, 6)

    def loss(outputs: Any) -> Tensor:
        return outputs.logits.square().mean()

    program = whence.capture(model, (ids,), backward=loss, preserve_calls=["**.q_proj", "**.v_proj"])
    tree, eager = program.unflatten(copy=True).requires_grad_(False), deepcopy(model).requires_grad_(False)
    for path in [f"model.layers.{at}.self_attn.{which}_proj" for at in range(3) for which in "qv"]:
        for one in (tree, eager):
            one.set_submodule(path, Adapted(one.get_submodule(path)))
    tree(ids)[0].backward()
    loss(eager(ids)).backward()
    assert differing(gradients(eager), gradients(tree)) == []
    trained = {name.split(".")[-2] for name, held in gradients(tree).items() if held is not None}
    assert trained == {"down", "up"}


def test_base_that_was_frozen_at_capture() -> None:
    """Nothing led a gradient to the original then; the error says when to freeze."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(False)
    tree = whence.capture(model, (X,), backward=True, preserve_calls=["0"]).unflatten(copy=True)
    tree.set_submodule("0", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(whence.CallError, match="freeze it afterwards"):
        tree(X)

"""Constructions of models as people write them: composites, caches, sizes, values that decide, coin flips."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whence

Kind = Literal["forward", "joint"]
Body = Callable[..., Any]


@dataclass(frozen=True)
class Refusal:
    """The error that whence has to raise, words of its message, and why refusing is right.

    One of a `run` comes where a program of a forward is run with gradients, and else of the capture.
    """

    error: type[whence.WhenceError]
    words: str
    why: str
    of_run: bool = False


@dataclass(frozen=True, eq=False)
class Construction:
    """A forward over `Parts`, its example inputs, and what is refused of it; `decide` is the capture's.

    One that `asks_grad_mode` in Python may hold for the mode of the capture alone; then `check` says so.
    """

    body: Body
    inputs: Callable[[], tuple[Any, ...]]
    decide: str | None = None
    refused: Mapping[Kind, Refusal] = field(default_factory=dict)
    asks_grad_mode: bool = False

    @property
    def name(self) -> str:
        return self.body.__name__

    def make(self) -> nn.Module:
        """The same bits at every call."""
        torch.manual_seed(0)
        return Parts(self.body)


class Parts(nn.Module):
    """Everything that the forwards below use."""

    scale: Tensor
    seen: Tensor
    codes: Tensor
    started: Tensor
    place: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.5)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("codes", torch.zeros(3, 4))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


ROWS: list[Construction] = []


def seeded(number: int) -> None:
    """Torch, Python and NumPy draw the same from here on."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def generators() -> dict[str, Any]:
    """Where the generators are."""
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [numpy[1].tolist(), *numpy[2:]],
    }


def numbers(*shape: int) -> Tensor:
    """The same numbers at every call, of both signs."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*(shape or (3, 4)), generator=generator)


def row(
    *inputs: Callable[[], Any],
    decide: str | None = None,
    refused: Mapping[Kind, Refusal] | None = None,
    asks_grad_mode: bool = False,
) -> Callable[[Body], Body]:
    """The decorated function is a row, called with `Parts` and with what `inputs` make; `numbers` alone."""

    def add(body: Body) -> Body:
        made = inputs or (numbers,)

        def example() -> tuple[Any, ...]:
            return tuple(make() for make in made)

        ROWS.append(Construction(body, example, decide, refused or {}, asks_grad_mode))
        return body

    return add


def undifferentiable(why: str) -> Mapping[Kind, Refusal]:
    """A forward that runs without gradients alone."""
    return {"forward": Refusal(whence.NotDifferentiable, "cannot be differentiated", why, of_run=True)}


def never(error: type[whence.WhenceError], words: str, why: str) -> Mapping[Kind, Refusal]:
    """What is refused forward and joint."""
    refusal = Refusal(error, words, why)
    return {"forward": refusal, "joint": refusal}


# --- at PyTorch's level: custom functions, hooks, grad modes, autocast ---------------------------------


class Reversed(torch.autograd.Function):
    """Hands gradients on with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.weight * gradients[0], None


class Rounded(torch.autograd.Function):
    """Rounds, and hands gradients straight through."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (ctx.saved_tensors[0].abs() < 1)


OWN = undifferentiable("its backward is Python's, and no program of a forward holds it")
HOOKED = undifferentiable("what the hook does to gradients is not in a program of a forward")


@row(refused=OWN)
def reverses_gradients(m: Parts, x: Tensor) -> Tensor:
    return m.other(Reversed.apply(m.linear(x), 0.5))


@row(refused=OWN)
def rounds_straight_through(m: Parts, x: Tensor) -> Tensor:
    return Rounded.apply(m.linear(x)) * 2


@row()
def straight_through_by_detach(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return hidden + (hidden.round() - hidden).detach()


@row(refused=HOOKED, asks_grad_mode=True)
def hook_on_an_activation(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return m.other(hidden)


@row(asks_grad_mode=True)
def retains_a_gradient(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    if hidden.requires_grad:
        hidden.retain_grad()
    return m.other(hidden).tanh()


@row()
def target_without_gradients(m: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.other(x).softmax(-1)
    return m.linear(x).log_softmax(-1) * target


@row()
def gradients_within_no_grad(m: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = m.linear(x)
        with torch.enable_grad():
            second = m.linear(x)
    return first * second


@row()
def grad_mode_by_a_flag(m: Parts, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(m.training and torch.is_grad_enabled()):
        hidden = m.linear(x)
    return m.other(hidden)


@row()
def under_autocast(m: Parts, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.other(m.linear(x).relu()).float()


@row()
def checkpointed(m: Parts, x: Tensor) -> Tensor:
    hidden = torch.utils.checkpoint.checkpoint(lambda y: m.drop(m.linear(y)), x, use_reentrant=False)
    return m.other(hidden)


@row(lambda: numbers(2, 5, 4))
def attention_with_a_mask(m: Parts, x: Tensor) -> Tensor:
    q, k, v = m.linear(x), m.other(x), x
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )


@row(asks_grad_mode=True)
def differentiates_where_it_can(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x).tanh()
    try:
        (slope,) = torch.autograd.grad(hidden.sum(), m.linear.weight, retain_graph=True)
    except RuntimeError:
        return hidden
    return hidden * slope.sum().detach()


@row(refused=undifferentiable("a program of a forward cannot let its own buffer require a gradient"))
def lets_a_buffer_require_gradients(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = m.seen
    if m.training:
        loss.requires_grad_()
    return m.linear(x), loss + m.linear(x).square().mean()


@row(refused=undifferentiable("it ran a backward inside, which is differentiated again"))
def forces(m: Parts, x: Tensor) -> Tensor:
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        energy = m.other(m.linear(place).tanh()).sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=m.training and torch.is_grad_enabled())
    return force + m.linear(x)


@row()
def per_sample_by_vmap(m: Parts, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda y: m.linear(y).tanh() @ y)(x)


@row()
def functional_call(m: Parts, x: Tensor) -> Tensor:
    doubled = {name: held * 2 for name, held in m.linear.named_parameters()}
    return torch.func.functional_call(m.linear, doubled, (x,))


@row()
def in_place_on_parts(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x).clone()
    hidden[:, :2].mul_(2)
    hidden[hidden.shape[0] // 2] += 1
    return m.other(hidden).relu_()


# --- asks whether it is being compiled ---------------------------------------------------------------


@row()
def skips_where_compiled(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return hidden if torch.compiler.is_compiling() else m.norm(hidden)


@row()
def looks_unless_compiled(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    if not torch.compiler.is_compiling() and hidden.isnan().any():
        raise ValueError("not a number")
    return hidden.sin()


@row(lambda: numbers(2, 4), lambda: torch.ones(2, 4, dtype=torch.bool))
def mask_unless_traced(m: Parts, x: Tensor, mask: Tensor) -> Tensor:
    is_traced = torch.jit.is_tracing() or torch.compiler.is_exporting() or torch._dynamo.is_compiling()
    hidden = m.linear(x)
    return hidden if is_traced else hidden.masked_fill(~mask, 0)


# --- caches passed in and updated --------------------------------------------------------------------


@row(lambda: numbers(2, 4), lambda: torch.zeros(2, 6, 4), lambda: torch.tensor([2]))
def decode_into_a_cache(m: Parts, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    cache.index_copy_(1, at, m.linear(x).detach()[:, None])
    seen = (torch.arange(6) <= at)[None, :, None]
    return m.other(x) + (cache * seen).sum(1)


@row(lambda: numbers(2, 4), lambda: {"keys": numbers(2, 3, 4), "step": 3})
def decode_by_concatenation(m: Parts, x: Tensor, cache: dict[str, Any]) -> Any:
    keys = torch.cat([cache["keys"], m.linear(x)[:, None]], 1)
    return (m.other(x)[:, None] @ keys.mT).softmax(-1) @ keys, {"keys": keys, "step": cache["step"] + 1}


@row(lambda: numbers(2, 4), lambda: torch.zeros(8, 4))
def writes_rows_of_a_cache(m: Parts, x: Tensor, cache: Tensor) -> Tensor:
    with torch.no_grad():
        cache[2:4] = m.linear(x)
    return m.other(x) + cache[:4].sum(0)


@row()
def running_average(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    with torch.no_grad():
        m.scale.lerp_(hidden.abs().mean(0), 0.1)
        m.seen += 1
    return hidden / m.scale.clone()


@row()
def buffer_assigned(m: Parts, x: Tensor) -> Tensor:
    m.scale = 0.9 * m.scale + 0.1 * x.detach().abs().mean(0)
    return m.linear(x) * m.scale


@row()
def buffer_data_copied(m: Parts, x: Tensor) -> Tensor:
    m.scale.data.copy_(0.9 * m.scale + x.detach().abs().mean(0))
    return m.linear(x) * m.scale


@row()
def buffer_data_replaced(m: Parts, x: Tensor) -> Tensor:
    m.scale.data = 0.9 * m.scale + x.detach().abs().mean(0)
    return m.linear(x) * m.scale


@row()
def data_cast_to_the_dtype_that_it_has(m: Parts, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data.to(x.dtype)
    return m.linear(x)


@row()
def copies(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return m.other(copy.copy(hidden)) + copy.copy(hidden.detach()) + copy.copy(x).mul(2) + hidden


@row()
def deep_copies(m: Parts, x: Tensor) -> Tensor:
    hidden, layer = m.linear(x), copy.deepcopy(m.other)
    kept = copy.deepcopy({"x": x, "hidden": hidden.detach(), "again": x, "scale": m.scale})
    kept["hidden"].mul_(2)
    return layer(hidden) + kept["hidden"] * kept["x"] + hidden * (kept["x"] is kept["again"]) * kept["scale"]


@row()
def codes_by_average(m: Parts, x: Tensor) -> Tensor:
    nearest = torch.cdist(m.linear(x), m.codes).argmin(1)
    chosen = F.one_hot(nearest, 3).float()
    m.codes.data.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.1)
    return m.linear(x) + m.codes[nearest]


# --- sizes that a branch excludes --------------------------------------------------------------------


@row()
def one_is_special(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if x.shape[0] != 1 else m.other(x)


@row()
def pads_to_a_multiple(m: Parts, x: Tensor) -> Tensor:
    missing = -x.shape[0] % 4
    padded = F.pad(m.linear(x), (0, 0, 0, missing)) if missing else m.linear(x)
    return padded.view(-1, 2, 4).mean(1)


@row()
def loop_over_a_size(m: Parts, x: Tensor) -> Tensor:
    found = [m.linear(x[at]) * at for at in range(x.shape[0])]
    return torch.stack(found)

"""Random module graphs, for hypothesis to search: nesting, sharing, repeated calls, and what else is hard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4

Step = tuple[str, int]
"""What to do, and with which of the values or modules at hand."""

KINDS = (
    *(
        "call",
        "call",
        "call",
        "residual",
        "two results",
        "closure",
        "write",
        "write a row",
        "no grad",
        "detach",
    ),
    *("scale", "gate", "reuse", "checkpoint", "count", "norm", "drop", "borrow"),
)


IN_PLACE = ("write given", "write a row of given", "write through a view", "write a child's")
"""Writes that autograd does not stand: on what a module was given, and on buffers that others hold."""


@dataclass(frozen=True)
class Recipe:
    """A module: its steps, and the recipes of its children; a recipe without steps is a linear layer."""

    steps: tuple[Step, ...] = ()
    children: tuple[Recipe, ...] = ()
    shares: tuple[int, ...] = ()


LEAF = Recipe()


def recipes(*without: str, more: tuple[str, ...] = ()) -> st.SearchStrategy[Recipe]:
    """Modules three levels deep at most, without some kinds of steps, and with more."""
    kinds = [kind for kind in (*KINDS, *more) if kind not in without]
    steps = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 5)), min_size=1, max_size=5).map(tuple)
    shares = st.lists(st.integers(0, 5), max_size=1).map(tuple)

    def around(children: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
        return st.builds(Recipe, steps, st.lists(children, min_size=1, max_size=3).map(tuple), shares)

    return around(st.one_of(st.just(LEAF), around(st.just(LEAF) | around(st.just(LEAF)))))


class Built(nn.Module):
    """A module made from a recipe; `reach` calls a module of its caller's."""

    calls_made: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.steps = recipe.steps
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls_made", torch.tensor(0.0))
        for position, child in enumerate(recipe.children):
            self.add_module(f"part{position}", built(child))
        for position, shared in enumerate(recipe.shares):
            self.add_module(f"again{position}", self.part(shared))

    def part(self, which: int) -> nn.Module:
        """One of the children."""
        parts = [module for name, module in self.named_children() if name.startswith("part")]
        return parts[which % len(parts)]

    def run(self, which: int, *args: Any) -> Tensor:
        """Call a child; of several results the sum."""
        children = list(self._modules)
        result = getattr(self, children[which % len(children)])(*args)
        return sum(result) if isinstance(result, tuple) else result  # type: ignore[return-value]

    def forward(self, x: Tensor, reach: Callable[[Tensor], Tensor] | None = None) -> Any:
        values = [x]
        for kind, which in self.steps:
            step = _STEPS[kind]
            values.append(step(self, values, which, reach))
        return (
            (values[-1], values[len(values) // 2])
            if any(kind == "two results" for kind, _ in self.steps)
            else values[-1]
        )


class Leaf(nn.Linear):
    """A linear layer that a caller may hand a function, which it calls on its own result."""

    def forward(self, x: Tensor, reach: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = super().forward(x)
        return hidden if reach is None else reach(hidden)


def built(recipe: Recipe) -> nn.Module:
    """The module of a recipe."""
    return Built(recipe) if recipe.steps else Leaf(WIDTH, WIDTH)


Values = list[Tensor]
Reach = Callable[[Tensor], Tensor] | None


def _call(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return m.run(which, values[-1])


def _residual(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return values[-1] + m.run(which, values[-1])


def _two_results(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return torch.sin(values[-1])


def _closure(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    sibling, outer = m.part(which + 1), values[which % len(values)]

    def through(hidden: Tensor) -> Tensor:
        result = sibling(hidden * outer.sigmoid())
        return sum(result) if isinstance(result, tuple) else result  # type: ignore[return-value]

    return m.run(which, values[-1], through)


def _write(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    hidden = values[-1] * 1.5
    hidden.add_(values[which % len(values)]).mul_(0.5)
    return hidden


def _write_a_row(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    hidden = values[-1] + 0.5
    hidden[which % hidden.shape[0]] = m.scale
    hidden[:, 1:].mul_(0.5)
    return hidden


def _no_grad(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    with torch.no_grad():
        target = m.run(which, values[-1])
    return values[-1] + 0.1 * target


def _detach(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return values[-1] * values[which % len(values)].detach().cos()


def _scale(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    scaled = values[-1] * m.scale
    return scaled if reach is None else scaled + reach(scaled)


def _gate(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    first, second = torch.cat([values[-1], values[which % len(values)]], -1).chunk(2, -1)
    return torch.sigmoid(first) * second


def _reuse(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return values[-1] + values[which % len(values)].tanh()


def _checkpoint(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    hidden: Tensor = checkpoint(m.run, which, values[-1], use_reentrant=False)
    return hidden


def _count(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    m.calls_made += 1
    return values[-1] / (1 + m.calls_made)


def _norm(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return nn.functional.layer_norm(values[-1], (WIDTH,), m.scale)


def _drop(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    return nn.functional.dropout(values[-1], 0.3, training=True)


def _borrow(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    part = m.part(which)
    return values[-1] * part.scale if isinstance(part, Built) else values[-1] @ part.get_parameter("weight")


def _write_given(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    values[0].mul_(0.5)
    return values[-1] + 1


def _write_a_row_of_given(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    values[0][which % values[0].shape[0]].add_(m.scale.detach())
    return values[-1] + values[0]


def _write_through_a_view(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    m.calls_made.view(1).add_(1)
    return values[-1] + m.calls_made


def _write_a_childs(m: Built, values: Values, which: int, reach: Reach) -> Tensor:
    child = m.part(which)
    if isinstance(child, Built):
        child.calls_made.mul_(2).add_(1)
    return values[-1] * 0.5


_STEPS: dict[str, Callable[[Built, Values, int, Reach], Tensor]] = {
    "call": _call,
    "residual": _residual,
    "two results": _two_results,
    "closure": _closure,
    "write": _write,
    "write a row": _write_a_row,
    "no grad": _no_grad,
    "detach": _detach,
    "scale": _scale,
    "gate": _gate,
    "reuse": _reuse,
    "checkpoint": _checkpoint,
    "count": _count,
    "norm": _norm,
    "drop": _drop,
    "borrow": _borrow,
    "write given": _write_given,
    "write a row of given": _write_a_row_of_given,
    "write through a view": _write_through_a_view,
    "write a child's": _write_a_childs,
}

"""A checkpoint runs its forward again in the backward, and must draw the same random numbers.

Eager rewinds the random number generator for that. In the program the second draw is replaced by the result
of the first: the same numbers, the same state of the generator afterwards.
"""

from collections.abc import Mapping, Sequence

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.errors import Place, UnmatchedRecomputation
from whence.program.node_records import origin_of
from whence.rewriting.functionalize import Functional

Redraws = Mapping[fx.Node, fx.Node | None]


def reuse_random_draws(functional: Functional, redraws: Redraws) -> frozenset[fx.Node]:
    """Let every repeated draw read the result of the one it repeats; returns the draws that may go."""
    pairs = [
        (again, first)
        for again, first in redraws.items()
        if first is not None and first.target is again.target
    ]
    if len(pairs) < len(redraws):
        raise _unmatched([node for node in redraws if node not in dict(pairs)])
    for again, first in pairs:
        now = functional.value_of(again)
        now.replace_all_uses_with(functional.value_of(_first(redraws, first)))
    repeated = {*redraws}
    return frozenset(repeated | {made for made, source in functional.sources.items() if source in repeated})


def _first(redraws: Redraws, node: fx.Node) -> fx.Node:
    """The draw at the start of a chain: a checkpoint inside a checkpoint repeats a repetition."""
    while (before := redraws.get(node)) is not None:
        node = before
    return node


def _unmatched(draws: Sequence[fx.Node]) -> UnmatchedRecomputation:
    origin = origin_of(draws[0])
    names = ", ".join(dict.fromkeys(op_name(node.target) for node in draws))
    return UnmatchedRecomputation(
        f"a recomputed {names} cannot be matched with the draw it repeats",
        where=Place(
            str(origin.place) if origin.place else None, str(origin.source) if origin.source else None
        ),
        why="the checkpoint did not draw the same random numbers the second time as the first",
        remedy="let the region draw alike each time it runs, or turn checkpointing off for the capture",
    )

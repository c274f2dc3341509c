"""A checkpoint runs its forward again in the backward, and must draw the same random numbers.

Eager rewinds the random number generator for that. In the program the second draw is replaced by the first
one's result: the same numbers, the same state of the generator afterwards.
"""

from collections import defaultdict

from torch import fx

from whence._torch.operators import draws, op_name
from whence.errors import CaptureError, Place
from whence.program.origins import origin_of
from whence.provenance import CallSite
from whence.schema import Phase

Draws = dict[tuple[CallSite | None, object], list[fx.Node]]


def reuse_random_draws(graph: fx.Graph) -> None:
    """Let every recomputed random operation read the result of the draw it repeats."""
    first: Draws = defaultdict(list)
    again: Draws = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            origin = origin_of(node)
            if origin.phase is Phase.FORWARD or origin.recomputed:
                (again if origin.recomputed else first)[origin.place, node.target].append(node)
    for key, repeated in again.items():
        if len(first[key]) != len(repeated):
            raise _unmatched(repeated[0])
        for before, node in zip(first[key], repeated, strict=True):
            node.replace_all_uses_with(before)
            graph.erase_node(node)


def _unmatched(node: fx.Node) -> CaptureError:
    origin = origin_of(node)
    return CaptureError(
        f"a recomputed {op_name(node.target)} cannot be matched with the draw it repeats",
        where=Place(
            str(origin.place) if origin.place else None, str(origin.source) if origin.source else None
        ),
        why="the checkpoint did not draw as many random numbers the second time as the first",
        remedy="turn checkpointing off for the capture",
    )

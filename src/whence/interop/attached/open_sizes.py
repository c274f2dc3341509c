"""Sizes that a graph from elsewhere left open: how they are read from the arguments, and what they must keep.

A tracer notes what it assumed of sizes while it traced. For sizes that break it the graph may be another one,
so that every assumption becomes a rule of the program, or the graph is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from whence._torch.sizes.symbols import Assumed, assumed_of, is_symbolic, names_of_sizes, sizes_in
from whence.errors import Fault
from whence.interop.attached.arguments import ArgumentLeaf
from whence.program.arguments.open_sizes import Asker, Dimension, SizeRule, Sizes, bounds, relation, sizes_of

_FIXED = "trace the graph with fixed sizes, or capture or export the model with dynamic_shapes"


def open_sizes(ready: fx.GraphModule, leaves: Sequence[ArgumentLeaf]) -> tuple[Sizes | None, list[Fault]]:
    """The sizes that vary, with all that was assumed of them; None where none does. Faults say what fails."""
    placeholders = [node for node in ready.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in placeholders]
    if not any(is_symbolic(size) for value in values for size in sizes_in(value)):
        return None, []
    sizes = sizes_of([leaf.value for leaf in leaves], [leaf.path for leaf in leaves])
    known = {reading.name: reading.dimension for reading in sizes.readings}
    assumed = assumed_of(values)
    faults = list(_faults(placeholders, assumed, known))
    if faults:
        return None, faults
    return replace(sizes, rules=(*sizes.rules, *_rules(assumed, known))), []


def _faults(
    placeholders: Sequence[fx.Node], assumed: Assumed, known: dict[str, Dimension]
) -> Iterator[Fault]:
    for node in placeholders:
        if unknown := sorted(names_of_sizes(node.meta.get("val")) - set(known)):
            yield Fault(
                f"{node.name} has the size {unknown[0]}, which is the size of no argument", remedy=_FIXED
            )
    for condition, names in assumed.conditions:
        if not names <= set(known):
            yield Fault(
                f"the graph holds where {condition}, of sizes that are not those of arguments", remedy=_FIXED
            )
    if assumed.of_data:
        yield Fault("sizes in the graph depend on the values of tensors", remedy=_FIXED)


def _rules(assumed: Assumed, known: dict[str, Dimension]) -> Iterator[SizeRule]:
    for name, low, high in assumed.limits:
        if name in known:
            yield from bounds(known[name], name, (low, high), Asker())
    for condition, names in assumed.conditions:
        dimensions = tuple(known[name] for name in sorted(names))
        yield SizeRule(dimensions, condition, relation(condition), Asker())

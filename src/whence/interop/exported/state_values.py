"""The values that each piece of state goes through.

Where writes are operations they say so. A decomposed export says only what a buffer holds in the end: which
values it had between several calls of its module follows from where the first of these reads it.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from whence.interop.graphs.call_sites import Sites
from whence.program import Call
from whence.rewriting.functionalize import Functional


def histories(
    written: Mapping[str, fx.Node], functional: Functional, sites: Sites
) -> dict[str, tuple[str, ...]]:
    """The values of each written input in order, by name."""
    noted = {node.name: [value.name for value in values] for node, values in functional.history.items()}
    return {
        name: tuple(dict.fromkeys((*noted.get(name, ()), *_between(name, value, noted, sites), value.name)))
        for name, value in written.items()
    }


def _between(name: str, last: fx.Node, noted: Mapping[str, object], sites: Sites) -> Iterator[str]:
    """What later calls of a module read where its first one reads a buffer that only the signature writes."""
    state = next((node for node in last.graph.find_nodes(op="placeholder") if node.name == name), None)
    if state is None or name in noted:
        return
    calls = {sites.homes[user] for user in state.users if user in sites.homes}
    if len(calls) != 1:
        return
    (first,) = (sites.calls.rows[number] for number in calls)
    nodes = _nodes_of(first, sites)
    for later in sites.calls:
        if later.number > first.number and later.site.path == first.site.path:
            found = _in_the_place_of(state, nodes, _nodes_of(later, sites))
            if found is not None:
                yield found.name


def _nodes_of(call: Call, sites: Sites) -> list[fx.Node]:
    return [node for node, home in sites.homes.items() if home == call.number]


def _in_the_place_of(state: fx.Node, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> fx.Node | None:
    """The one value that these nodes read wherever those of the first call, which do the same, read it."""
    if [node.target for node in nodes] != [node.target for node in others]:
        return None
    pairs = (
        zip(one.all_input_nodes, other.all_input_nodes, strict=False)
        for one, other in zip(nodes, others, strict=True)
    )
    found = {theirs for pair in pairs for ours, theirs in pair if ours is state}
    return found.pop() if len(found) == 1 and state not in found else None

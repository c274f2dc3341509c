"""Which gradients reached a value: the same in a call that is replayed."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from whence.program import Adjoint, Contribution
from whence.tracing.attribution.gradient_edges import GradientSums

Links = dict[fx.Node, list["Link"]]
"""For each value, the gradients that reached it, in order."""
Instead = Mapping[fx.Node, tuple[range, list["Link"]]]
"""For each gradient that stood for others: the calls that it came from, and the links that replace it."""


class Link(NamedTuple):
    """One gradient that reached a value: its node, the call it came from, the sum it became a part of."""

    node: fx.Node
    scope: int
    sum: fx.Node | None

    def moved(self, written: Mapping[fx.Node, fx.Node], offset: int) -> "Link":
        """The same in a call that is replayed, where other nodes are written and calls have other numbers."""
        total = None if self.sum is None else written[self.sum]
        return Link(written[self.node], self.scope + offset, total)


def links_of(keys: Mapping[fx.Node, tuple[int, ...]], gradients: GradientSums) -> Links:
    """The gradients that reached the values whose gradients are collected at `keys`."""
    return {
        node: [Link(arrival.node, arrival.scopes[0], arrival.sum) for arrival in gradients.arrivals[key]]
        for node, key in keys.items()
        if key in gradients.arrivals
    }


def settled(table: Links, instead: Instead) -> Links:
    """A table without links to what stood for others."""
    return {
        value: [new for link in links for new in _instead(link, instead)] for value, links in table.items()
    }


def _instead(link: Link, instead: Instead) -> list[Link]:
    """What stands for a link to the backward of a replayed call; others may have been handed its result."""
    if link.node not in instead:
        return [link]
    scopes, links = instead[link.node]
    if link.scope not in scopes:
        return [link._replace(node=links[-1].sum or links[-1].node)]
    return [links[0]._replace(sum=link.sum)] if len(links) == 1 else links


def adjoints_of(table: Links) -> dict[str, Adjoint]:
    """The table by names."""
    return {value.name: Adjoint(tuple(map(_contribution, links))) for value, links in table.items()}


def _contribution(link: Link) -> Contribution:
    return Contribution(link.node.name, link.scope, None if link.sum is None else link.sum.name)

"""Casts to the dtype that a tensor has: they give back what they were given, and others read it as theirs.

A tracer knows tensors by identity. After `y = x.to(x.dtype)` in one module it notes every later use of `x` as
one of `y`, also where nobody handed out `y`. Where the export kept what a call returns, it is known. A call
that returns such a `y` returns its argument: which of the two several readers meant, nobody can tell.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.operators.schemas import gives_back
from whence.interop.graphs.call_sites import Sites
from whence.provenance.places import ancestors


@dataclass(frozen=True)
class Echo:
    """A value that is another one, which is meant outside of the calls `inside`, and as their result."""

    node: fx.Node
    source: fx.Node
    inside: range

    def is_meant_by(self, number: int) -> bool:
        """Whether the call with this number, in what it takes and returns, means the value itself."""
        return number in self.inside and number != self.inside.start


def echoes(sites: Sites, returned: Callable[[int], Iterable[Any] | None]) -> Iterator[Echo]:
    """What is read outside of preserved calls that did not return it, last values first.

    `returned` gives what a call returns, by its number; None for one of which the export did not keep that.
    """
    parents = sites.calls.parents
    for node in reversed([*sites.homes]):
        around = ancestors(parents, sites.homes[node]) if _given_back(node) is not None else ()
        for number in around:
            results, inside = returned(number), sites.calls.within(number)
            source = None if results is None else _source_of(node, sites, inside)
            readers = [user for user in node.users if sites.homes.get(user, 0) not in inside]
            is_result = results is not None and any(result is node for result in results)
            if source is not None and (len(readers) > 1 or not is_result):
                yield Echo(node, source, inside)
                break


def without(flat_returned: tuple[Any, ...], found: Iterable[Echo], sites: Sites) -> tuple[Any, ...]:
    """What the graph returns, after everyone reads what was meant."""
    for echo in found:
        for user in [user for user in echo.node.users if sites.homes.get(user, 0) not in echo.inside]:
            user.replace_input_with(echo.node, echo.source)
        flat_returned = tuple(echo.source if value is echo.node else value for value in flat_returned)
    return flat_returned


def meant(value: Any, number: int, found: Iterable[Echo]) -> Any:
    """What a call with this number means by a value."""
    for echo in found:
        if value is echo.node and not echo.is_meant_by(number):
            value = echo.source
    return value


def _source_of(node: fx.Node, sites: Sites, inside: range) -> fx.Node | None:
    """The value from outside of a call that is given back by casts in it, one of another."""
    source = _given_back(node)
    while source is not None and sites.homes.get(source, 0) in inside:
        source = _given_back(source)
    return source


def _given_back(node: fx.Node) -> fx.Node | None:
    if not gives_back(node.target, node.args, node.kwargs):
        return None
    (source, *_), made = node.all_input_nodes, node.meta["val"]
    before = source.meta["val"]
    same = (made.dtype, made.device, made.layout) == (before.dtype, before.device, before.layout)
    return source if same else None

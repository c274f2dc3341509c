"""The one place where an origin is written to and read from a graph node."""

from torch import fx

from whence.errors import Place
from whence.provenance import Origin
from whence.schema import Phase, Quality

ORIGIN = "whence_origin"
"""The key of an origin in the metadata of a node."""
_UNKNOWN = Origin(Phase.FORWARD, quality=Quality.NONE)


def set_origin(node: fx.Node, origin: Origin) -> None:
    """Say where a node came from; copies of the node carry the origin along."""
    node.meta[ORIGIN] = origin


def origin_of(node: fx.Node) -> Origin:
    """Where a node came from; an origin of quality `none` when nobody said."""
    origin = node.meta.get(ORIGIN, _UNKNOWN)
    return origin if isinstance(origin, Origin) else _UNKNOWN


def place_of(node: fx.Node) -> Place:
    """Where a node came from, for an error: its calls, and the user's line."""
    origin = origin_of(node)
    module = " + ".join(map(str, origin.calls)) if origin.calls else None
    return Place(module, str(origin.source) if origin.source else None)


def has_origin(node: fx.Node) -> bool:
    """Whether somebody said where the node came from."""
    return ORIGIN in node.meta

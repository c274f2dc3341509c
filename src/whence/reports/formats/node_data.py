"""A number for each node as Model Explorer's node data, with the fields of its `node_data_builder` 0.1.34.

https://github.com/google-ai-edge/model-explorer
"""

import math
from collections.abc import Mapping
from typing import Any

from whence.errors import UsageError
from whence.reports.formats.model_explorer import graph_id, graphs_of, kept_bytes
from whence.reports.formats.nodes import Drawn, Row, cost_with_inside

FIGURES = ("flops", "bytes", "kept", "seconds")
"""FLOPs, bytes moved, bytes that the backward keeps, and what a device takes at least."""

_COLOURS = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e8833a"}]


def node_data(figures: Row) -> dict[str, Any]:
    """The figure that is asked for, or the caller's own numbers, for the graphs that `model_explorer` writes.

    What is no finite number is left out, and so are nodes without a number. A node that runs graphs has what
    they take, the largest of branches: those of the outer graph add up to what `cost()` says.
    """
    own, figure = figures["values"], figures["figure"] or FIGURES[0]
    if figure not in FIGURES:
        raise UsageError(f"there is no figure {figure!r}", remedy=f"the figures are {', '.join(FIGURES)}")
    numbers = _numbers(figures, figure) if own is None else own
    return {
        graph_id(figures, holder): {
            "name": figure if own is None else "values",
            "results": {
                node.name: {"value": numbers[node.name]}
                for node in nodes
                if math.isfinite(numbers.get(node.name, math.nan))
            },
            "gradient": _COLOURS,
        }
        for holder, nodes in graphs_of(figures)
    }


def _numbers(figures: Row, figure: str) -> Mapping[str, float]:
    if figure == "kept":
        return kept_bytes(figures)
    counted = [node for _, nodes in graphs_of(figures) for node in nodes if node.name in figures["costs"]]
    return {node.name: _figure(node, figures, figure) for node in counted}


def _figure(node: Drawn, figures: Row, figure: str) -> float:
    flops, read, written, seconds = cost_with_inside(node, figures)
    return {"flops": flops, "bytes": read + written, "seconds": seconds}[figure]

"""The program as a pass finds it, and how its nodes are recognised afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from whence._torch.graphs import own_copy
from whence._torch.record.annotations import CUSTOM, said_of
from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.provenance import Origin

MARK = "whence_before"
"""The key, in the metadata of a node, of the node's name before the pass; copies of the metadata carry it.

It is there twice: `torch.fx.traceback.preserve_node_meta` takes along what is under `custom` alone.
"""

Saved = tuple[str, Any, Any, Any, str]
"""What a node is: kind, target, arguments, keyword arguments, name."""


@dataclass(frozen=True)
class WorkingCopy:
    """A program before a pass, its own graph untouched, and a working copy that the pass may edit.

    `names` gives for each node of the working copy its name before the pass.
    """

    program: FlatProgram
    working: fx.GraphModule
    names: Mapping[fx.Node, str]
    saved: Mapping[fx.Node, Saved]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.graph.nodes}

    @property
    def is_untouched(self) -> bool:
        """Whether the program's own graph is as it was."""
        nodes = list(self.program.graph.nodes)
        return nodes == list(self.saved) and all(_saved(node) == row for node, row in self.saved.items())

    def origin(self, name: str) -> Origin:
        """Where a node came from before the pass."""
        return origin_of(self.nodes[name])


def before(program: FlatProgram) -> WorkingCopy:
    """Make a working copy, whose nodes are marked."""
    working = own_copy(program.graph_module, program.name)
    names = {node: node.name for node in working.graph.nodes}
    for node, name in names.items():
        node.meta[MARK] = name
        node.meta[CUSTOM] = {**said_of(node), MARK: name}
    return WorkingCopy(program, working, names, {node: _saved(node) for node in program.graph.nodes})


def mark_of(node: fx.Node) -> str | None:
    """The name before the pass of the node whose metadata a node carries."""
    mark: str | None = node.meta.get(MARK) or said_of(node).get(MARK)
    return mark


def _saved(node: fx.Node) -> Saved:
    return node.op, node.target, node.args, node.kwargs, node.name


def clean(graph: fx.Graph) -> None:
    """Take the marks off."""
    for node in graph.nodes:
        node.meta.pop(MARK, None)
        said = {key: value for key, value in said_of(node).items() if key != MARK}
        node.meta |= {CUSTOM: said} if said else {}
        if not said:
            node.meta.pop(CUSTOM, None)

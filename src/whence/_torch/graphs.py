"""fx graph modules whose Python code is written only when somebody runs or reads it.

The lazy kind is private; the public `fx.GraphModule` prints the whole graph as source in its constructor,
which costs as much as a tenth of a capture.
"""

import builtins
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph module over `graph`; attributes the graph reads are shared with `root`, not copied."""
    return _LazyGraphModule(root, graph, name)


def name_plainly(node: fx.Node, wanted: str) -> None:
    """Let a placeholder be called what its caller calls it, also where fx would not: `input` is a builtin.

    fx appends a number to names of builtins; as the parameter of a generated function such a name only hides
    the builtin there, and fx gives it to no other node.
    """
    if node.name != wanted and hasattr(builtins, wanted) and wanted not in {n.name for n in node.graph.nodes}:
        node.name = node.target = wanted

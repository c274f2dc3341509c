"""Where in the user's model, and in the graph, something is that a program cannot hold."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from torch import fx

from whence.errors import Fault, Place, UnsupportedGraph
from whence.interop.graphs.frames import STACK, Frame, segments, source_of
from whence.program.queries.printing import marked
from whence.provenance import ModulePath

_NONE: Mapping[str, str] = MappingProxyType({})
_NO_TYPES: Mapping[ModulePath, str] = MappingProxyType({})
_SCOPES = "mend nn_module_stack in the pass that wrote it; without it an operation is given to who uses it"


def refusal(graph: fx.Graph, faults: Iterable[Fault], names: Mapping[str, str] = _NONE) -> UnsupportedGraph:
    """One error for all faults, with the nodes that they name; `names` leads from other words to nodes."""
    rows = list(faults)
    error = UnsupportedGraph.of(rows)
    known = {node.name: node.name for node in graph.nodes} | dict(names)
    notes: dict[str, list[str]] = {}
    for fault in rows:
        words = fault.what.replace(",", " ").replace(":", " ").split()
        for name in dict.fromkeys(known[word] for word in words if word in known):
            notes.setdefault(name, []).append(fault.what)
    error.shown = marked(graph, notes, around=0)
    return error


def scope_faults(
    frames: Mapping[fx.Node, tuple[Frame, ...] | None], types: Mapping[ModulePath, str] = _NO_TYPES
) -> Iterator[Fault]:
    """Stacks of modules that contradict each other, or the model's `types`: one module of several classes, a
    module that the model does not have."""
    first: dict[ModulePath, tuple[str, fx.Node]] = {}
    for node, found in frames.items():
        for frame in found or ():
            kind, other = first.setdefault(frame.path, (frame.type, node))
            if types and frame.path not in types:
                what = f"{node.name} comes from {frame.path}, which the model does not have"
            elif frame.type and kind and kind != frame.type:
                what = f"{frame.path} is a {kind} to {other.name} and a {frame.type} to {node.name}"
            elif types and frame.type and other is node and frame.type != types[frame.path]:
                of_model = types[frame.path]
                what = f"{frame.path} is a {frame.type} to {node.name}, and a {of_model} in the model"
            else:
                continue
            yield Fault(what, place_of(node), remedy=_SCOPES)


def place_of(node: fx.Node) -> Place:
    """The module and the line of a node of an exported graph, as far as it says."""
    stack = node.meta.get(STACK) or {}
    paths = [str(segments(str(raw))) for raw, *_ in stack.values()]
    line = source_of(node)
    return Place(paths[-1] if paths else None, None if line is None else str(line))

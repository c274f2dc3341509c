"""fx graph modules whose Python code is written only when somebody runs or reads it.

The lazy kind is private; the public `fx.GraphModule` prints the whole graph as source in its constructor,
which costs as much as a tenth of a capture.
"""

import builtins
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _custom_builtins
from torch.fx.node import Node, map_aggregate

from whence._torch.operators.table import fake_kernel
from whence._torch.pytrees import tree_flatten

NAMES_OF_CODE = frozenset({"self", *_custom_builtins})
"""What code that fx writes calls its module, PyTorch and the like: nothing else in it may be called so."""


def graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph module over `graph`; attributes the graph reads are shared with `root`, not copied."""
    return _LazyGraphModule(root, graph, name)


def with_code(module: fx.GraphModule) -> fx.GraphModule:
    """The module, with the code of its graphs made: Dynamo reads none that make it when called."""
    for part in module.modules():
        if isinstance(part, _LazyGraphModule):
            part.real_recompile()
    return module


_WRITTEN_BY_REPR = frozenset({bool, int, float, complex, str, bytes})


def has_classes_of_its_own(graph: fx.Graph) -> bool:
    """Whether a graph has numbers or texts of other classes than Python's, of which fx's code makes others;
    operators are given none."""
    nodes = [node for node in graph.nodes if not isinstance(node.target, OpOverload)]
    found = (value for node in nodes for value in tree_flatten((node.args, node.kwargs))[0])
    return any(map(_is_of_its_own, found))


def hold_classes_of_its_own(module: fx.GraphModule) -> None:
    """Let a graph read such numbers and texts (NumPy's `float64`) from its module."""
    for node in [*module.graph.nodes]:
        with module.graph.inserting_before(node):
            args, kwargs = map_aggregate((node.args, node.kwargs), partial(_held, module))
        node.args, node.kwargs = args, kwargs


def _held(module: fx.GraphModule, value: Any) -> Any:
    if not _is_of_its_own(value):
        return value
    name = f"literal_of_its_own_{sum(each.startswith('literal_of_its_own_') for each in vars(module))}"
    setattr(module, name, value)
    return module.graph.create_node("get_attr", name)


def _is_of_its_own(value: Any) -> bool:
    kinds = (int, float, complex, str, bytes)
    return isinstance(value, kinds) and type(value) not in _WRITTEN_BY_REPR and not isinstance(value, Enum)


def nested_graph(node: fx.Node, within: nn.Module | None = None) -> fx.GraphModule | None:
    """The graph that a node reads, for a branch or a loop to run; else None.

    It is looked for `within` a module, or else in that of the node's own graph.
    """
    if node.op != "get_attr":
        return None
    holder = node.graph.owning_module if within is None else within
    held = None if holder is None else attribute_at(holder, str(node.target))
    return held if isinstance(held, fx.GraphModule) else None


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node of a graph and of the graphs inside it, in order."""
    for node in module.graph.nodes:
        yield node
        if (inner := nested_graph(node)) is not None:
            yield from all_nodes(inner)


def own_copy(
    module: fx.GraphModule, name: str | None = None, tensors: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """A graph with nodes of its own, under the same names; graphs in it are copied.

    Tensors that it reads are shared, but for those that are given, by their paths.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made[node] = graph.node_copy(node, lambda source: made[source])
    for node, copied in made.items():
        name_exactly(copied, node.name)
    targets = {str(node.target): node for node in module.graph.nodes if node.op == "get_attr"}
    nested = {name: nested_graph(node) for name, node in targets.items()}
    held = {
        name: attribute_at(module, name) if inner is None else own_copy(inner)
        for name, inner in nested.items()
    }
    held |= {name: tensor for name, tensor in (tensors or {}).items() if name in held}
    return graph_module(held, graph, name or type(module).__name__)


def attribute_at(module: nn.Module, path: str) -> Any:
    """What a module holds at an attribute path; None where there is nothing."""
    held: Any = module
    for segment in path.split("."):
        held = getattr(held, segment, None)
    return held


def returned(graph: fx.Graph) -> tuple[Any, ...] | None:
    """The values that a graph returns; None where it returns no flat row of them."""
    last = next(iter(reversed(graph.nodes)), None)
    if last is None or last.op != "output" or not last.args or not isinstance(last.args[0], (tuple, list)):
        return None
    return tuple(last.args[0])


def fake_result(target: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, on the fake values of its arguments."""
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    with torch.no_grad():
        return fake_kernel(target)(*fake_args, **fake_kwargs)


Replacement = Callable[[fx.Node, str], None]
"""Takes a node and the name of the one that is now read in its place."""


@contextmanager
def replacements_told(module: fx.GraphModule, tell: Replacement) -> Iterator[None]:
    """Inside the block, `tell` hears of every use of a node of the graph that goes over to another.

    PyTorch has hooks for this on graph modules (it records provenance with them); they are private.
    """

    def hear(old: fx.Node, new: str, user: fx.Node) -> None:  # noqa: ARG001
        if old.name != new:
            tell(old, new)

    module._register_replace_node_hook(hear)
    try:
        yield
    finally:
        module._unregister_replace_node_hook(hear)


def value_inputs(node: fx.Node) -> list[fx.Node]:
    """The values that a node reads; the graphs that it runs are none."""
    return [
        source for source in node.all_input_nodes if source.op != "get_attr" or nested_graph(source) is None
    ]


def placeholder(graph: fx.Graph, name: str, meta: Mapping[str, Any]) -> fx.Node:
    """A placeholder that is called so, also where fx would not."""
    node = graph.create_node("placeholder", name, name=name)
    name_exactly(node, name)
    node.meta = dict(meta)
    return node


def name_exactly(node: fx.Node, wanted: str) -> None:
    """Let a placeholder be called what its caller calls it, also where fx would not: `input` is a builtin.

    fx appends a number to names of builtins; as the parameter of a generated function such a name only hides
    the builtin there, and fx gives it to no other node. What no parameter can be called, such as a module's
    name in angle brackets, or an argument `torch`, which would hide PyTorch in the generated function, is
    spelled as fx spells the node.
    """
    if node.name != wanted and hasattr(builtins, wanted) and wanted not in {n.name for n in node.graph.nodes}:
        node.name = node.target = wanted
    if node.name == "self":  # which fx gives away
        node.name = node.graph._graph_namespace.create_name("self", None)
    if node.op == "placeholder" and (
        not str(node.target).isidentifier() or str(node.target) in NAMES_OF_CODE
    ):
        node.target = node.name


_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")


@dataclass(frozen=True)
class NameCounts:
    """How far a graph has counted for each base of a name, at some moment: `add_4` is number 4 of `add`."""

    counts: Mapping[str, int]

    @classmethod
    def now(cls, graph: fx.Graph) -> "NameCounts":
        """The counts of a graph."""
        return cls(dict(graph._graph_namespace._base_count))

    def since(self, before: "NameCounts") -> "NameCounts":
        """How many names were given since an earlier moment, for the bases that were used."""
        grown = {base: count - before.start(base) for base, count in self.counts.items()}
        return NameCounts({base: count for base, count in grown.items() if count})

    def start(self, base: str) -> int:
        """The number before the first one that is given from now on; a builtin's name begins at 1."""
        found = self.counts.get(base)
        return found if found is not None else 0 if hasattr(builtins, base) else -1


def skip_names(graph: fx.Graph, used: NameCounts) -> set[str]:
    """Leave out as many names of each base as were used somewhere else.

    Returns the bases that are names themselves among those left out.
    """
    names, bare = graph._graph_namespace, set[str]()
    counts = names._base_count
    known = NameCounts(counts)
    for base, count in used.counts.items():
        if base not in counts and not hasattr(builtins, base):
            names._used_names.add(base)
            bare.add(base)
        counts[base] = known.start(base) + count
    return bare


@contextmanager
def separately_named(graph: fx.Graph) -> Iterator[None]:
    """Nodes that are made inside the block have names that do not count for others."""
    before = graph._graph_namespace
    graph._graph_namespace = type(before)()
    try:
        yield
    finally:
        graph._graph_namespace = before


def base_and_number(name: str) -> tuple[str, int]:
    """`add` and 4 for `add_4`, `add` and 0 for `add`."""
    found = _NUMBERED.fullmatch(name)
    return (name, 0) if found is None else (found[1], int(found[2] or 0))


class Inserter:
    """Puts operations in front of a node, without the checks that `Graph.create_node` makes for each.

    `left_out` are names that nobody has although they are taken.
    """

    def __init__(self, graph: fx.Graph, left_out: set[str]) -> None:
        self._graph = graph
        self._left_out = left_out
        names = graph._graph_namespace
        self._used, self._names = names._used_names, names._obj_to_name
        self._table = graph._find_nodes_lookup_table.table
        self._rows: dict[int, dict[fx.Node, None]] = {}
        """Those of the table, by the identity of the target: an operator's own hash is Python code."""

    def __call__(self, before: fx.Node, name: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node that calls `target`, which lives as long as the graph, in front of `before`."""
        if name in self._used:
            if name not in self._left_out:
                name = self._graph._graph_namespace.create_name(name, None)
            self._left_out.discard(name)
        made = Node(self._graph, name, "call_function", target, args, kwargs)
        self._used.add(name)
        self._names[made] = name
        row = self._rows.get(id(target))
        if row is None:
            row = self._rows[id(target)] = self._table["call_function", target]
        row[made] = None
        before._prepend(made)
        self._graph._len += 1
        return made


class Appender:
    """Appends nodes to a graph without the checks that `Graph.create_node` makes for each.

    Names must be new to the graph: whoever gives them knows that.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        names = graph._graph_namespace
        self._used, self._names = names._used_names, names._obj_to_name
        self._table = graph._find_nodes_lookup_table.table

    def __call__(self, kind: str, name: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node of this name at the end of the graph."""
        made = Node(self._graph, name, kind, target, args, kwargs)
        self._used.add(name)
        self._names[made] = name
        self._table[kind, target if kind == "call_function" else None][made] = None
        self._graph._root._prepend(made)
        self._graph._len += 1
        return made


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes that an argument of a node is, or holds."""
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found

"""A graph becomes columns; `reading.py` is its mirror.

Nodes are named by their place in the graph. What equal layers repeat (arguments but for the values they read,
origins but for the call, what values are) is stored once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name
from whence._torch.record.annotations import CUSTOM
from whence.errors import Fault
from whence.interop.archive.graphs.targets import target_name
from whence.interop.archive.records.checked import column
from whence.interop.archive.records.forms import Atom, Fixed, Listed, Row
from whence.interop.archive.records.kinds import NODE_NAME
from whence.interop.archive.records.values import first_words
from whence.interop.archive.records.writing import Writer
from whence.program.node_records import Contribution, place_of, record_of
from whence.provenance import Origin

KINDS = ("placeholder", "get_attr", "call_function", "output")
MARKS = (
    *("is_seed", "is_differentiable", "is_straight_through", "is_turned_on", "is_turned_off"),
    "is_behind",
)
TORCH_FUNCTION = "torch_fn"
ORIGIN, CONTRIBUTION = Listed(Origin, 6), Listed(Contribution, 3)
VERSIONS = Row(Fixed((NODE_NAME, Atom((int,)))), tuple)


@dataclass
class GraphWriter:
    """Writes a graph and those inside it: `graphs` are all of them, the program's own first.

    `attributes` are the names of nodes that read tensors of the program's state.
    """

    writer: Writer
    attributes: frozenset[str]
    graphs: list[Any] = field(default_factory=list)
    _origins: dict[tuple[int, int], int] = field(default_factory=dict)
    _values: dict[int, int] = field(default_factory=dict)
    _words: list[str | None] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)

    def write(self, module: fx.GraphModule) -> int:
        """Write a graph; its number."""
        number = len(self.graphs)
        self.graphs.append(None)
        nodes = list(module.graph.nodes)
        at = {node: position for position, node in enumerate(nodes)}
        reads: list[int] = []
        targets = [self._target(node) for node in nodes]  # which writes the graphs inside
        self.writer.names = {node.name: position for node, position in at.items()}
        graph = {
            "name": type(module).__name__,
            "names": [node.name for node in nodes],
            "kinds": column([node.op for node in nodes]),
            "targets": targets,
            "forms": [self._form(node, at, reads) for node in nodes],
            "reads": reads,
            "values": [self._value(node) for node in nodes],
            "origins": [self._origin(node) for node in nodes],
            "records": list(self._records(nodes)),
            "functions": list(self._functions(nodes)),
            "notes": list(self._notes(nodes)),
        }
        self.graphs[number] = graph
        return number

    def _refuse(self, node: fx.Node, what: str, why: str) -> None:
        self.writer.faults.append(Fault(what, where=place_of(node), why=why))

    def _target(self, node: fx.Node) -> Any:
        if node.op == "call_function":
            found = target_name(node.target)
            if found is None:
                why = "a file holds operators by their names, and no functions of Python's"
                self._refuse(node, f"{node.name} calls {op_name(node.target)}", why)
            return self.writer.pool("targets").number(found)
        if node.op not in KINDS:
            self._refuse(node, f"{node.name} is a {node.op}", "a file holds calls of operators alone")
        inner = nested_graph(node)
        if inner is not None:
            return [str(node.target), self.write(inner)]
        if node.op == "get_attr" and node.name not in self.attributes:
            why = "a file holds tensors of a program's state, and graphs of branches and loops"
            self._refuse(node, f"{node.name} reads {node.target}", why)
        return str(node.target)

    def _form(self, node: fx.Node, at: dict[fx.Node, int], reads: list[int]) -> int:
        """The arguments of a node with numbers in the place of what it reads."""
        first = len(reads)

        def number(source: fx.Node) -> int:
            reads.append(at[source])
            return len(reads) - 1 - first

        self.writer.nodes = number
        args = [self.writer.anything(each) for each in node.args]
        kwargs = [[key, self.writer.anything(each)] for key, each in node.kwargs.items()]
        self.writer.nodes = None
        form = self.writer.pool("forms").number([args, kwargs])
        if form == len(self._words):
            self._words.append(first_words([args, kwargs]))
        if (unknown := self._words[form]) is not None:
            self._refuse(node, f"{node.name} is given {unknown}", "a file holds numbers, texts and the like")
        return form

    def _value(self, node: fx.Node) -> int | None:
        if "val" not in node.meta:
            return None
        value = node.meta["val"]
        if id(value) not in self._values:
            self._kept.append(value)
            self._values[id(value)] = self.writer.pool("values").number(self.writer.anything(value))
        return self._values[id(value)]

    def _origin(self, node: fx.Node) -> int | None:
        origin = record_of(node).origin
        if origin is None:
            return None
        key = id(origin), id(self.writer.names)
        if key not in self._origins:
            self._kept += [origin, self.writer.names]
            self._origins[key] = self.writer.pool("origins").number(ORIGIN.write(self.writer, origin))
        return self._origins[key]

    def _records(self, nodes: Sequence[fx.Node]) -> Iterator[list[Any]]:
        """What is said of single nodes beside where they come from."""
        for position, node in enumerate(nodes):
            record = record_of(node)
            marks = [number for number, mark in enumerate(MARKS) if getattr(record, mark)]
            parts = () if record.adjoint is None else record.adjoint.contributions
            adjoint = [CONTRIBUTION.write(self.writer, part) for part in parts]
            versions = VERSIONS.write(self.writer, record.versions)
            if marks or adjoint or versions or record.unclear:
                yield [position, marks, adjoint, versions, sorted(record.unclear)]

    def _functions(self, nodes: Sequence[fx.Node]) -> Iterator[list[int]]:
        """The functions of torch that nodes were made by, as tracers note them."""
        pool = self.writer.pool("functions")
        for position, node in enumerate(nodes):
            match node.meta.get(TORCH_FUNCTION):
                case (str() as name, str() as function):
                    yield [position, pool.number([name, function])]

    def _notes(self, nodes: Sequence[fx.Node]) -> Iterator[list[Any]]:
        """What the user wrote on nodes, where it is plain."""
        for position, node in enumerate(nodes):
            noted = node.meta.get(CUSTOM)
            if noted and first_words(written := self.writer.anything(dict(noted))) is None:
                yield [position, written]

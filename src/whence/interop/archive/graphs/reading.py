"""Columns become a graph; the mirror of `writing.py`.

Names end up in Python code that `torch.fx` writes, so each is looked at before a node has it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from whence._torch.graphs import NAMES_OF_CODE, Appender, graph_module
from whence._torch.operators.schemas import op_name, other_arguments
from whence._torch.record.annotations import CUSTOM
from whence.interop.archive.graphs.targets import target_named
from whence.interop.archive.graphs.writing import CONTRIBUTION, KINDS, MARKS, ORIGIN, TORCH_FUNCTION, VERSIONS
from whence.interop.archive.records.checked import (
    expanded,
    identifier,
    listed,
    mapping,
    number,
    place,
    places,
    raise_unless,
    text,
)
from whence.interop.archive.records.checked import names as checked_names
from whence.interop.archive.records.reading import Reader
from whence.interop.archive.results import layout_of
from whence.program.node_records import RECORD, Adjoint, NodeRecord, record_of

_PATH = re.compile(r"\w+(\.\w+)*", re.ASCII)
Fill = Callable[[Sequence[fx.Node]], tuple[Any, dict[str, Any]]]
"""Makes the arguments of a node of the nodes that it reads."""


@dataclass(frozen=True)
class ArgumentForm:
    """The arguments of nodes of one form: how many values they read, and how these are arranged.

    `positional` is how many arguments there are, `names` are those of the keyword arguments behind them.
    """

    count: int
    fill: Fill
    positional: int
    names: tuple[str, ...] = ()


@dataclass
class GraphReader:
    """Reads the graphs of a file; `held` gives what a `get_attr` of the program's state finds.

    `missing` are operators that this process does not know, or knows with other arguments, by name.
    `distinct` has one node of all that call one operator alike, with values that are laid out alike.
    """

    reader: Reader
    graphs: Sequence[Any]
    held: Mapping[str, Any]
    missing: list[str] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    forms: list[ArgumentForm] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    functions: list[tuple[str, str]] = field(default_factory=list)
    distinct: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    _layouts: list[Any] = field(default_factory=list)
    _reading: set[int] = field(default_factory=set)
    _called: set[tuple[int, int]] = field(default_factory=set)

    def read_tables(self) -> None:
        """Read what graphs share."""
        tables = self.reader.tables
        for said in listed(tables.get("targets", [])):
            target = target_named([text(part) for part in listed(said)])
            if target is None:
                self.missing.append(".".join(said[1:]))
            self.targets.append(target)
        self.forms = [self._arguments(*listed(form)) for form in listed(tables.get("forms", []))]
        self.values = [self.reader.anything(value) for value in listed(tables.get("values", []))]
        self._layouts = list(map(layout_of, self.values))
        self.functions = [(text(a), text(b)) for a, b in listed(tables.get("functions", []))]

    def read(self, position: int) -> fx.GraphModule:
        """The graph of that number, with those inside it."""
        raise_unless(position not in self._reading, "a graph is inside itself, or in two places")
        self._reading.add(position)
        data = mapping(self.graphs[place(position, self.graphs)])
        graph = fx.Graph()
        names = checked_names(data["names"])
        root: dict[str, Any] = {}
        nodes = self._append(graph, names, data, root)
        taken = {node.target for node in nodes if node.op == "placeholder" and node.target != node.name}
        raise_unless(NAMES_OF_CODE.isdisjoint(names), "a node has a name that code of fx has for itself")
        raise_unless(
            position == 0 or taken.isdisjoint({*NAMES_OF_CODE, *names}),
            "a graph inside takes what its code calls otherwise",
        )
        self._describe(nodes, names, data)
        return graph_module(root, graph, text(data["name"]))

    # --- nodes ---------------------------------------------------------------------------------------

    def _append(
        self, graph: fx.Graph, names: list[str], data: dict[str, Any], root: dict[str, Any]
    ) -> list[fx.Node]:
        append, nodes, at = Appender(graph), list[fx.Node](), 0
        kinds, targets = expanded(data["kinds"], text), listed(data["targets"])
        forms, reads = places(data["forms"], self.forms), places(data["reads"], names)
        for name, kind, said, form in zip(names, kinds, targets, forms, strict=True):
            arguments = self.forms[form]
            end = at + arguments.count
            read = [nodes[number] for number in reads[at:end]]  # of those that are there by now
            raise_unless(len(read) == arguments.count, "a node reads more than there is")
            at = end
            target = self._target(kind, said, root)
            if kind == "call_function" and (said, form) not in self._called:
                self._note_call(said, form)
            nodes.append(append(kind, name, target, *arguments.fill(read)))
        raise_unless(at == len(reads), "there is more to read than nodes read")
        given = [said for kind, said in zip(kinds, targets, strict=True) if kind == "placeholder"]
        raise_unless(len(set(given)) == len(given), "two arguments have one name")
        raise_unless(
            bool(nodes) and kinds.index("output") == len(kinds) - 1, "a graph has one output, at its end"
        )
        return nodes

    def _note_call(self, said: int, form: int) -> None:
        """Another release may have an operator with other arguments."""
        self._called.add((said, form))
        target, arguments = self.targets[said], self.forms[form]
        if other := other_arguments(target, arguments.positional, arguments.names):
            self.missing.append(f"{op_name(target)} {other}")

    def _target(self, kind: str, said: Any, root: dict[str, Any]) -> Any:
        if kind == "call_function":
            target = self.targets[place(said, self.targets)]
            return _unknown if target is None else target
        raise_unless(kind in KINDS, f"{kind!r} is no kind of node")
        if isinstance(said, list):
            path, graph = said
            raise_unless(kind == "get_attr", "only get_attr reads a graph")
            root[_path(path)] = self.read(graph)
            return path
        if kind == "get_attr":
            raise_unless(_path(said) in self.held, f"{said!r} is no state of the program")
            root[said] = self.held[said]
        elif kind == "placeholder":
            identifier(said)
        return kind if kind == "output" else said

    def _arguments(self, args: Any, kwargs: Any) -> ArgumentForm:
        """How the arguments of nodes of one form are made; nearly all are values and constants in a row."""
        holes = _holes([args, kwargs])
        raise_unless(holes == list(range(len(holes))), "arguments are not numbered in order")
        for key, _ in listed(kwargs):
            identifier(key)
        if not kwargs and all(map(_is_hole, listed(args))):
            return ArgumentForm(len(holes), lambda read: (tuple(read), {}), len(args))
        if not _holes([each for each in (*args, *kwargs) if not _is_hole(each)]) and not kwargs:
            constants = [None if _is_hole(each) else self.reader.anything(each) for each in args]
            at = [place for place, each in enumerate(args) if _is_hole(each)]
            return ArgumentForm(len(holes), lambda read: (_placed(constants, at, read), {}), len(args))
        names = tuple(key for key, _ in kwargs)
        return ArgumentForm(len(holes), partial(_arguments_over, self.reader, args, kwargs), len(args), names)

    # --- what is said of them ------------------------------------------------------------------------

    def _describe(self, nodes: list[fx.Node], names: list[str], data: dict[str, Any]) -> None:
        reader, rows = self.reader, listed(self.reader.tables.get("origins", []))
        reader.names = names
        origins, values = places(data["origins"], rows), places(data["values"], self.values)
        records = {at: NodeRecord(ORIGIN.read(reader, rows[at])) for at in {*origins} - {None}}
        for node, origin, value in zip(nodes, origins, values, strict=True):
            if value is not None:
                node.meta["val"] = self.values[value]
            if origin is not None:
                node.meta[RECORD] = records[origin]
        self._note_distinct(nodes, data, [None if at is None else self._layouts[at] for at in values])
        for at, marks, adjoint, versions, unclear in listed(data["records"]):
            node = nodes[place(at, nodes)]
            parts = tuple(CONTRIBUTION.read(reader, part) for part in listed(adjoint))
            node.meta[RECORD] = NodeRecord(
                origin=record_of(node).origin,
                adjoint=Adjoint(parts) if parts else None,
                versions=VERSIONS.read(reader, versions),
                unclear=frozenset(map(number, listed(unclear))),
                **{MARKS[place(mark, MARKS)]: True for mark in listed(marks)},
            )
        for at, function in listed(data["functions"]):
            nodes[place(at, nodes)].meta[TORCH_FUNCTION] = self.functions[place(function, self.functions)]
        for at, noted in listed(data["notes"]):
            nodes[place(at, nodes)].meta[CUSTOM] = dict(self.reader.anything(noted))

    def _note_distinct(self, nodes: list[fx.Node], data: dict[str, Any], layouts: Sequence[Any]) -> None:
        at, reads = 0, data["reads"]
        for node, said, form, layout in zip(nodes, data["targets"], data["forms"], layouts, strict=True):
            start, at = at, at + self.forms[form].count
            if type(said) is int:
                read = [layouts[number] for number in reads[start:at]]
                self.distinct.setdefault((said, form, layout, *read), node)


def _arguments_over(
    reader: Reader, args: Any, kwargs: Any, read: Sequence[fx.Node]
) -> tuple[Any, dict[str, Any]]:
    reader.nodes = read.__getitem__
    try:
        made = tuple(map(reader.anything, args))
        return made, {key: reader.anything(each) for key, each in kwargs}
    finally:
        reader.nodes = None


def _unknown(*_args: Any, **_kwargs: Any) -> None:
    """Stands for an operator that this process does not know, until all of them are named."""


def _path(data: Any) -> str:
    raise_unless(_PATH.fullmatch(text(data)) is not None, f"{data!r} is no path of an attribute")
    return str(data)


def _is_hole(data: Any) -> bool:
    return isinstance(data, dict) and "node" in data


def _holes(data: Any) -> list[Any]:
    """The numbers of the values that arguments read, in order."""
    return list(_holes_in(data))


def _holes_in(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        if "node" in data:
            yield data["node"]
            return
        data = list(data.values())
    for each in data if isinstance(data, list) else ():
        yield from _holes_in(each)


def _placed(constants: Sequence[Any], at: Sequence[int], read: Sequence[fx.Node]) -> tuple[Any, ...]:
    filled = list(constants)
    for position, node in zip(at, read, strict=True):
        filled[position] = node
    return tuple(filled)

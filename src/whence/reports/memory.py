"""What memory a program takes: what the backward keeps of the forward, and the peak by liveness.

Memory is counted by storages: a view is no memory of its own, nor is what is written in place. A storage
lives from the node that makes it to the last one that reads it, or a view of it; inputs live throughout, and
what is returned to the end. That is the program's own order, in which each operation has its result beside
its arguments; what kernels need for themselves meanwhile, and what an allocator rounds up, is not known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from whence._torch.graphs import nodes_in
from whence._torch.operators.schemas import op_name
from whence.program import Program
from whence.program.node_records import origin_of, place_of, record_of
from whence.program.queries.marks import READS_NO_VALUE
from whence.program.queries.notebook import OpensInNotebook
from whence.reports.cost import checked_sizes, data_named, viewed_argument
from whence.reports.flops import bytes_at
from whence.reports.numbers import scaled
from whence.schema import InputKind, OutputKind, Phase

_KINDS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.CONSTANT: "buffers",
    InputKind.OPTIMIZER_STATE: "optimizer state",
}

_SHOWN = 5


@dataclass(frozen=True)
class Kept:
    """A value of the forward that the backward reads: the call and line that made it, who reads it first."""

    node: str
    operation: str
    call: str
    line: str
    consumer: str
    reads: str
    bytes: int


@dataclass(frozen=True, repr=False)
class Memory(OpensInNotebook):
    """The memory of a program, in bytes.

    `kept` are the activations that the backward reads, largest first; weights and inputs are there anyway.
    `peak` is the most that is alive at once, `at` the node that runs then, `where` its call and line, and
    `parts` what it consists of: parameters, buffers, inputs, optimizer state, gradients, activations,
    temporaries. `timeline` says for each node how much is alive while it runs.
    """

    kept: tuple[Kept, ...]
    peak: int
    at: str
    where: str
    parts: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]

    @property
    def kept_bytes(self) -> int:
        """All that is kept for the backward."""
        return sum(row.bytes for row in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "parts": dict(self.parts), "kept_bytes": self.kept_bytes}

    def __repr__(self) -> str:
        return f"<Memory: {scaled(self.kept_bytes)}B kept, peak {scaled(self.peak)}B>"

    def __str__(self) -> str:
        """The peak and what it consists of, and the largest of what is kept, equal ones together."""
        parts = ", ".join(f"{kind} {scaled(size)}B" for kind, size in sorted(self.parts.items()) if size)
        alike: dict[tuple[str, str, int], list[Kept]] = {}
        for row in self.kept:
            alike.setdefault((row.operation, row.line, row.bytes), []).append(row)
        largest = sorted(alike.values(), key=lambda rows: -sum(row.bytes for row in rows))
        peak = f"peak {scaled(self.peak)}B while {self.at} runs ({self.where}): {parts}"
        return "\n".join([peak, *map(_kept_line, largest[:_SHOWN])])


def _kept_line(rows: Sequence[Kept]) -> str:
    first, times = rows[0], f" × {len(rows)}" if len(rows) > 1 else ""
    place = f"{first.call}{' …' if times else ''}, {first.line}"
    return f"kept {scaled(first.bytes)}B{times}: {first.operation} in {place}, which {first.reads}"


def memory_of(program: Program, sizes: Mapping[str, int] | None = None) -> Memory:
    """Read from shapes alone; nothing runs."""
    with data_named():
        return _memory(Storages(program, checked_sizes(program, sizes)))


def _memory(storages: "Storages") -> Memory:
    timeline, top = [], (-1, 0)
    for at, alive in enumerate(_alive(storages)):
        timeline.append((storages.nodes[at].name, alive))
        top = max(top, (alive, -at))
    peak, at = top[0], -top[1]
    node = storages.nodes[at]
    return Memory(
        kept=tuple(sorted(_kept(storages), key=lambda row: (-row.bytes, row.node))),
        peak=peak,
        at=node.name,
        where=str(place_of(node)),
        parts=_parts(storages, at),
        timeline=tuple(timeline),
    )


class Storages:
    """Which nodes share memory, and for how long it is needed."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program = program
        self.nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self._sizes = sizes

    @cached_property
    def bases(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The nodes that made the memory in which each value lies; a row of results has several.

        What was written in place lies where it lay: new weights, states of an optimizer, activations.
        """
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        named: dict[str, fx.Node] = {}
        for node in self.nodes:
            before = [named[name] for name, _ in record_of(node).versions if name in named]
            found[node] = found[before[0]] if before else self._bases(node, found)
            named[node.name] = node
        return found

    @cached_property
    def makers(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The nodes that computed each value: those that made its memory, or wrote it last."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in self.nodes:
            found[node] = self._bases(node, found)
        return found

    @cached_property
    def kept(self) -> dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]]:
        """Storages that the forward makes and the backward reads: who computed what is in each, which value
        is read first, and by what."""
        program, found = self.program, dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]]()
        if not program.has_backward and program.step is None:
            return found
        updated = {row.node for row in program.signature.outputs_of(OutputKind.MUTATION)}  # kept anyway
        for node in self.nodes:
            is_backward = node.op == "call_function" and origin_of(node).phase is Phase.BACKWARD
            if not is_backward or getattr(node.target, "overloadpacket", None) in READS_NO_VALUE:
                continue
            for source in node.all_input_nodes:
                for base, maker in zip(self.bases[source], self.makers[source], strict=True):
                    has_memory = base.op == "call_function" and isinstance(base.meta.get("val"), Tensor)
                    is_made = has_memory and origin_of(base).phase is Phase.FORWARD
                    if is_made and maker.name not in updated:
                        found.setdefault(base, (maker, source, node))
        return found

    def _bases(self, node: fx.Node, known: Mapping[fx.Node, tuple[fx.Node, ...]]) -> tuple[fx.Node, ...]:
        viewed = viewed_argument(node.target) if node.op == "call_function" else None
        if op_name(node.target) == "getitem":
            source = node.args[0]
            viewed_in = isinstance(source, fx.Node) and viewed_argument(source.target) is not None
            return known[source] if viewed_in and isinstance(source, fx.Node) else (node,)
        if viewed is not None and len(node.args) > viewed:
            return tuple(base for source in nodes_in(node.args[viewed]) for base in known[source])
        return (node,)

    @cached_property
    def size(self) -> dict[fx.Node, int]:
        """The bytes of each storage; a row of results holds none, its items do."""
        return {node: self._size(node) for node in {base for row in self.bases.values() for base in row}}

    def _size(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        return bytes_at(value, self._sizes) if isinstance(value, Tensor) else 0

    @cached_property
    def last(self) -> dict[fx.Node, int]:
        """The position of the last node that needs each storage."""
        found: dict[fx.Node, int] = {}
        for at, node in enumerate(self.nodes):
            for source in (*node.all_input_nodes, node):
                for base in self.bases[source]:
                    found[base] = at
        returned = (self.program.node(row.node) for row in self.program.signature.outputs if row.node)
        throughout = [node for node in self.nodes if node.op != "call_function"]
        for node in (*returned, *throughout):
            for base in self.bases[node]:
                found[base] = len(self.nodes)
        return found


def _alive(storages: Storages) -> Iterator[int]:
    """The bytes that are alive while each node runs."""
    inputs = [node for node in storages.nodes if node.op != "call_function"]
    alive = sum(storages.size.get(node, 0) for node in inputs)
    ends: dict[int, list[fx.Node]] = {}
    for node, at in storages.last.items():
        ends.setdefault(at, []).append(node)
    for at, node in enumerate(storages.nodes):
        alive += storages.size.get(node, 0) if node.op == "call_function" else 0
        yield alive
        alive -= sum(storages.size.get(gone, 0) for gone in ends.get(at, ()))


def _kept(storages: Storages) -> Iterator[Kept]:
    for base, (maker, source, node) in storages.kept.items():
        yield Kept(
            node=maker.name,
            operation=op_name(maker.target),
            call=place_of(maker).module or "the model's own code",
            line=place_of(maker).line or "",
            consumer=node.name,
            reads=f"{op_name(node.target)} reads as {source.name}",
            bytes=storages.size.get(base, 0),
        )


def _parts(storages: Storages, at: int) -> dict[str, int]:
    program = storages.program
    rows = (*program.signature.inputs, *program.signature.attributes)
    kinds = {row.name: _KINDS.get(row.kind, "inputs") for row in rows}
    returned = [row.node for row in program.signature.outputs_of(OutputKind.GRADIENT) if row.node]
    gradients = {base for name in returned for base in storages.bases[program.node(name)]}
    parts: dict[str, int] = {}
    for node, size in storages.size.items():
        if storages.last[node] < at or (node.op == "call_function" and storages.place[node] > at):
            continue
        if node.op != "call_function":
            kind = kinds.get(node.name, "inputs")
        elif node in gradients:
            kind = "gradients"
        else:
            kind = "activations" if node in storages.kept else "temporaries"
        parts[kind] = parts.get(kind, 0) + size
    return parts

"""What memory a program takes: what the backward keeps of the forward, and the peak by liveness.

Memory is counted by storages: a view is no memory of its own, nor is what is written in place. A storage
lives from the node that makes it to the last one that reads it, or a view of it; inputs live throughout, and
what is returned to the end. That is the program's own order, in which each operation has all its results
beside its arguments. Storages are held as autograd holds them: what a derivative reads goes when all of the
derivative is there, and gradients are summed in the memory of the first one where nobody else reads that.
What kernels need for themselves meanwhile, and what of it they keep for the backward, is in no shape: it is
named (`gaps`), or measured, where somebody asks for that and the kernels are those of this CPU: each runs
once on zeros. What an allocator rounds up is not counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from whence._torch.graphs import nodes_in
from whence._torch.observe.kernel_memory import KernelMemory, Layout, run_on_zeros
from whence._torch.operators.schemas import op_name
from whence._torch.operators.table import said_of
from whence._torch.sizes.symbols import SYMBOLIC, size_at
from whence.dependence.asking import Failed, attempt
from whence.program import FlatProgram
from whence.program.node_records import origin_of, place_of, record_of
from whence.program.queries.marks import READS_NO_VALUE
from whence.program.queries.notebook import OpensInNotebook
from whence.program.queries.plain import AsJSON
from whence.reports.cost import checked_sizes, data_named, viewed_argument
from whence.reports.flops import bytes_at, held_graphs, is_branch, shape_at
from whence.reports.numbers import scaled
from whence.schema import InputKind, OutputKind, Phase, Quality

_KINDS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.CONSTANT: "buffers",
    InputKind.OPTIMIZER_STATE: "optimizer state",
}

_SHOWN = 5
_HAVE_WORKSPACES = re.compile(r"convolution|conv\w*\dd|rnn|lstm|gru|batch_norm_backward")
"""Operators whose kernels unfold or lay out their arguments in memory of their own."""


@dataclass(frozen=True)
class Kept:
    """A value of the forward that the backward reads: the call and line that made it, who reads it first.

    One that is not `known` is the workspace of a kernel: nobody knows its size, and it counts as none.
    """

    node: str
    operation: str
    call: str
    line: str
    consumer: str
    reads: str
    bytes: int
    known: bool = True


@dataclass(frozen=True, repr=False)
class Memory(OpensInNotebook, AsJSON):
    """The memory of a program, in bytes.

    `kept` are the activations that the backward reads, largest first; weights and inputs are there anyway.
    `peak` is the most that is alive at once, `at` the node that runs then, `where` its call and line, and
    `parts` what it consists of: parameters, buffers, inputs, optimizer state, gradients, activations,
    temporaries. `timeline` says for each node how much is alive while it runs. `gaps` names what takes memory
    besides that nobody knows, with how often it occurs: it counts as none.
    """

    kept: tuple[Kept, ...]
    peak: int
    at: str
    where: str
    parts: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]
    gaps: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """All that is kept for the backward."""
        return sum(row.bytes for row in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = {"parts": dict(self.parts), "gaps": dict(self.gaps), "kept_bytes": self.kept_bytes}
        return {**asdict(self), **plain}

    def __repr__(self) -> str:
        return f"<Memory: {scaled(self.kept_bytes)}B kept, peak {scaled(self.peak)}B>"

    def __str__(self) -> str:
        """The peak and what it consists of, and the largest of what is kept, equal ones together."""
        parts = ", ".join(f"{kind} {scaled(size)}B" for kind, size in sorted(self.parts.items()) if size)
        alike: dict[tuple[str, str, int], list[Kept]] = {}
        for row in self.kept:
            alike.setdefault((row.operation, row.line, row.bytes), []).append(row)
        largest = sorted(alike.values(), key=lambda rows: (rows[0].known, -sum(row.bytes for row in rows)))
        least = "at least " if self.gaps else ""
        peak = f"peak {least}{scaled(self.peak)}B while {self.at} runs ({self.where}): {parts}"
        besides = [f"memory not known: {gap} (× {count})" for gap, count in self.gaps.items()]
        return "\n".join([peak, *map(_kept_line, largest[:_SHOWN]), *besides])


def _kept_line(rows: Sequence[Kept]) -> str:
    first, times = rows[0], f" × {len(rows)}" if len(rows) > 1 else ""
    place = f"{first.call}{' …' if times else ''}, {first.line}"
    size = f"{scaled(first.bytes)}B" if first.known else "of unknown size"
    return f"kept {size}{times}: {first.operation} in {place}, which {first.reads}"


def memory_of(
    program: FlatProgram, sizes: Mapping[str, int] | None = None, *, measure: bool = False
) -> Memory:
    """Read from shapes alone; nothing runs, but for kernels that are to be measured."""
    with data_named():
        return memory_in(Storages(program, checked_sizes(program, sizes), measured={} if measure else None))


def memory_in(storages: "Storages") -> Memory:
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
        gaps=_gaps(storages),
    )


class BackwardRead(NamedTuple):
    """A value of the forward that an operation of the backward reads: who computed it, which, and by what."""

    maker: fx.Node
    source: fx.Node
    node: fx.Node


class Storages:
    """Which nodes share memory, and for how long it is needed; of a graph inside without what it is given.

    `measured` are kernels that ran, by what they took; None where nothing is to run.
    """

    def __init__(
        self,
        program: FlatProgram,
        sizes: Mapping[str, int],
        inside: fx.GraphModule | None = None,
        measured: dict[Any, KernelMemory | None] | None = None,
    ) -> None:
        self.program = program
        self.graph = program.graph if inside is None else inside.graph
        self.nodes = [node for node in self.graph.nodes if node.op != "output"]
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self._sizes = sizes
        self._measured = measured

    @property
    def has_backward(self) -> bool:
        """Whether anything can be kept for a backward."""
        return self.program.has_backward or self.program.step is not None

    @cached_property
    def bases(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The nodes that made the memory in which each value lies; a row of results has several.

        What was written in place lies where it lay: new weights, states of an optimizer, activations.
        """
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        named: dict[str, fx.Node] = {}
        read: dict[fx.Node, int] = {}  # of each storage, where the last one is that is known to read it
        views = set[fx.Node]()
        for at, node in enumerate(self.nodes):
            before = [named[name] for name, _ in record_of(node).versions if name in named]
            summed = node.args[0] if self._is_sum_of_gradients(node) else None
            if isinstance(summed, fx.Node) and (summed not in views or node in self.grads):
                before += [summed] if self._is_summed_in(found[summed][0], node, read) else []
            found[node] = found[before[0]] if before else self._bases(node, found)
            named[node.name] = node
            if not before and found[node] != (node,):
                views.add(node)
            latest = max((self.place.get(user, len(self.nodes)) for user in node.users), default=at)
            for base in found[node]:
                read[base] = max(read.get(base, 0), latest)
        return found

    @cached_property
    def grads(self) -> frozenset[fx.Node]:
        """What a step puts into `.grad`, where it stays while the optimizer runs."""
        return frozenset() if self.program.step is None else frozenset(filter(_is_grad, self.nodes))

    def _is_sum_of_gradients(self, node: fx.Node) -> bool:
        is_sum = node in self.grads or origin_of(node).quality is Quality.ACCUMULATED
        return is_sum and node.target is torch.ops.aten.add.Tensor

    def _is_summed_in(self, base: fx.Node, node: fx.Node, read: Mapping[fx.Node, int]) -> bool:
        """Whether autograd sums a gradient with another in its memory: nobody else has that afterwards."""
        is_made = base.op == "call_function" and read[base] == self.place[node]
        return is_made and self._size(base) == self._size(node)

    @cached_property
    def makers(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The nodes that computed each value: those that made its memory, or wrote it last."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in self.nodes:
            found[node] = self._bases(node, found)
        return found

    @cached_property
    def readings(self) -> dict[fx.Node, tuple[BackwardRead, ...]]:
        """Storages that the forward makes and the backward reads, by what; not by what views them."""
        found = dict[fx.Node, list[BackwardRead]]()
        if not self.has_backward:
            return {}
        updated = {row.node for row in self.program.signature.outputs_of(OutputKind.MUTATION)}  # kept anyway
        for node in self.nodes:
            is_backward = node.op == "call_function" and origin_of(node).phase is Phase.BACKWARD
            if not is_backward or getattr(node.target, "overloadpacket", None) in READS_NO_VALUE:
                continue
            for source in node.all_input_nodes:
                for base, maker in zip(self.bases[source], self.makers[source], strict=True):
                    if is_made(base) and maker.name not in updated:
                        found.setdefault(base, []).append(BackwardRead(maker, source, node))
        return {base: self._real(rows) for base, rows in found.items()}

    def _real(self, rows: Sequence[BackwardRead]) -> tuple[BackwardRead, ...]:
        """Those that read the value itself, if any do: a view of it (`detach`) is read in its turn."""
        return tuple(row for row in rows if viewed_argument(row.node.target) is None) or tuple(rows)

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
        value, is_given = node.meta.get("val"), node.op != "call_function"
        if not isinstance(value, Tensor) or (is_given and self.graph is not self.program.graph):
            return 0
        kernel = self.kernel(row_of(node)) if _is_workspace(node) else None
        return bytes_at(value, self._sizes) if kernel is None else kernel.results[node.args[1]]  # type: ignore[index]

    def is_unknown(self, node: fx.Node) -> bool:
        """Whether nobody knows what memory a value takes."""
        return _is_workspace(node) and self.kernel(row_of(node)) is None

    def kernel(self, node: fx.Node) -> KernelMemory | None:
        """What the kernel of an operation took when it ran; None where it did not, or could not."""
        if self._measured is None or not _has_memory_of_its_own(node):
            return None
        given: Any = fx.map_arg((node.args, node.kwargs), self._argument)
        key = repr((node.target, given))
        if key not in self._measured:
            found = attempt(lambda: run_on_zeros(node.target, *given))
            self._measured[key] = None if isinstance(found, Failed) else found
        return self._measured[key]

    def _argument(self, source: fx.Node) -> Any:
        """What a kernel is given: a tensor that is laid out so, a number."""
        value, (base, *_) = source.meta.get("val"), self.bases[source]
        if not isinstance(value, Tensor):
            return size_at(value, self._sizes) if isinstance(value, SYMBOLIC) else value
        shape = (self._size(base),) if _is_workspace(base) else shape_at(value, self._sizes)
        strides = tuple(int(size_at(stride, self._sizes)) for stride in value.stride())
        return Layout(shape, strides, value.dtype, value.device)

    @cached_property
    def last(self) -> dict[fx.Node, int]:
        """The position of the last node that needs each storage."""
        found: dict[fx.Node, int] = {}
        for at, node in enumerate(self.nodes):
            derivative = self._derivatives.get(at, range(at, at + 1))
            for source in (*node.all_input_nodes, node):
                for base in self.bases[source]:
                    is_held = self.place[base] < derivative.start
                    found[base] = max(found.get(base, 0), derivative[-1] if is_held else at)
        returned = self.graph.output_node().all_input_nodes
        throughout = [node for node in self.nodes if node.op != "call_function"]
        for node in (*returned, *throughout, *self.grads):
            for base in self.bases[node]:
                found[base] = len(self.nodes)
        return found

    @cached_property
    def _derivatives(self) -> dict[int, range]:
        """For each node of the backward the nodes in a row that are the derivative of one operation."""
        found: dict[int, range] = {}
        for _, group in groupby(enumerate(self.nodes), key=lambda pair: _differentiates(pair[1])):
            places = [at for at, node in group if _differentiates(node)]
            found |= dict.fromkeys(places, range(places[0], places[-1] + 1)) if places else {}
        return found

    @cached_property
    def first(self) -> dict[fx.Node, int]:
        """The position at which each storage is taken: an item of a row is there with the whole row."""
        return {node: self.place[row_of(node)] for node in self.size}

    def meanwhile(self, node: fx.Node) -> int:
        """The bytes that are there only while a node runs: items that nobody reads, and what is inside."""
        row, kernel = node.meta.get("val"), self.kernel(node)
        beside = 0 if kernel is None else kernel.beside
        if not isinstance(row, (tuple, list)) or viewed_argument(node.target) is not None:
            return beside
        read = {user.args[1] for user in node.users if op_name(user.target) == "getitem"}
        unread = beside + sum(bytes_at(item, self._sizes) for at, item in enumerate(row) if at not in read)
        inside = max((self._inside(graph) for _, graph in held_graphs(node)), default=0)
        if not is_branch(node):  # what the trip before it made is there beside it
            return unread + inside
        return unread + max(0, inside - bytes_at(row, self._sizes))

    def _inside(self, graph: fx.GraphModule) -> int:
        return max(_alive(Storages(self.program, self._sizes, graph, self._measured)), default=0)


def _is_grad(node: fx.Node) -> bool:
    """Whether a step leaves a value in the `.grad` of a parameter: of its module, and no derivative."""
    origin = origin_of(node)
    is_kept = origin.phase is Phase.BACKWARD and (origin.place, origin.forward) == (None, None)
    return node.op == "call_function" and is_kept and len(origin.calls) == 1


def _differentiates(node: fx.Node) -> str | None:
    """The forward operation of which a node is a part of the derivative."""
    origin = origin_of(node)
    is_backward = node.op == "call_function" and origin.phase is Phase.BACKWARD and not origin.recomputed
    return origin.forward if is_backward else None


def is_made(base: fx.Node) -> bool:
    """Whether the forward makes the memory of a tensor."""
    has_memory = base.op == "call_function" and isinstance(base.meta.get("val"), Tensor)
    return has_memory and origin_of(base).phase is Phase.FORWARD


def row_of(node: fx.Node) -> fx.Node:
    """The operation that makes a value; that of an item is the one that makes the row."""
    is_item = op_name(node.target) == "getitem" and isinstance(node.args[0], fx.Node)
    return node.args[0] if is_item else node  # type: ignore[return-value]


def _alive(storages: Storages) -> Iterator[int]:
    """The bytes that are alive while each node runs."""
    inputs = [node for node in storages.nodes if node.op != "call_function"]
    alive = sum(storages.size.get(node, 0) for node in inputs)
    begins, ends = Counter[int](), Counter[int]()
    for node, size in storages.size.items():
        begins[storages.first[node]] += size if node.op == "call_function" else 0
        ends[storages.last[node]] += size
    for at, node in enumerate(storages.nodes):
        alive += begins[at]
        yield alive + storages.meanwhile(node)
        alive -= ends[at]


def _has_memory_of_its_own(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(_HAVE_WORKSPACES.search(op_name(node.target)))


def _is_workspace(node: fx.Node) -> bool:
    """Whether a value is what a kernel keeps for its backward, in a size that no shape says."""
    row = row_of(node)
    return row is not node and said_of(row.target).workspace == node.args[1]


def _gaps(storages: Storages) -> dict[str, int]:
    """What kernels keep for themselves while they run, and checkpoints beside their arguments."""
    found = Counter[str]()
    for node in storages.nodes:
        if _has_memory_of_its_own(node) and storages.kernel(node) is None:
            found[f"{op_name(node.target)}: what its kernel needs meanwhile"] += 1
        if storages.is_unknown(node):
            found[f"{op_name(row_of(node).target)}: the workspace that it keeps for the backward"] += 1
    if any(origin_of(node).recomputed for node in storages.nodes):
        found["checkpoint: the states of generators that it keeps"] = 1
    return dict(found)


def _kept(storages: Storages) -> Iterator[Kept]:
    for base, ((maker, source, node), *_) in storages.readings.items():
        yield Kept(
            node=maker.name,
            operation=op_name(maker.target),
            call=place_of(maker).module or "the model's own code",
            line=place_of(maker).line or "",
            consumer=node.name,
            reads=f"{op_name(node.target)} reads as {source.name}",
            bytes=storages.size.get(base, 0),
            known=not storages.is_unknown(base),
        )


def _parts(storages: Storages, at: int) -> dict[str, int]:
    program = storages.program
    rows = (*program.signature.inputs, *program.signature.attributes)
    kinds = {row.name: _KINDS.get(row.kind, "inputs") for row in rows}
    returned = [row.node for row in program.signature.outputs_of(OutputKind.GRADIENT) if row.node]
    held = (*map(program.node, returned), *storages.grads)
    gradients = {base for node in held for base in storages.bases[node]}
    parts = {"temporaries": storages.meanwhile(storages.nodes[at])}
    for node, size in storages.size.items():
        if storages.last[node] < at or (node.op == "call_function" and storages.first[node] > at):
            continue
        if node.op != "call_function":
            kind = kinds.get(node.name, "inputs")
        elif node in gradients:
            kind = "gradients"
        else:
            kind = "activations" if node in storages.readings else "temporaries"
        parts[kind] = parts.get(kind, 0) + size
    return parts

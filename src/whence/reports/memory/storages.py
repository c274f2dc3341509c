"""Which values of a program share memory, how much, and from where to where it is needed.

Memory is counted by storages: a view is no memory of its own, nor is what is written in place. A storage
lives from the node that makes it to the last one that reads it, or a view of it; inputs live throughout, and
what is returned to the end. That is the program's own order, in which each operation has all its results
beside its arguments. Storages are held as autograd holds them: what a derivative reads goes when all of the
derivative is there, and gradients are summed in the memory of the first one where nobody else reads that.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from whence._torch.graphs import nodes_in
from whence._torch.observe.kernel_memory import KernelMemory, Layout, is_profiling, run_on_zeros
from whence._torch.operators.schemas import draws, op_name
from whence._torch.operators.table import said_of
from whence._torch.sizes.symbols import SYMBOLIC, size_at
from whence.dependence.asking import Failed, attempt
from whence.errors import UsageError
from whence.program import FlatProgram
from whence.program.node_records import origin_of, record_of
from whence.program.queries.marks import READS_NO_VALUE
from whence.reports.flops import bytes_at, held_graphs, is_branch, open_bytes, shape_at
from whence.reports.views import depends_on_sizes, viewed_argument
from whence.schema import OutputKind, Phase, Quality

_HAVE_WORKSPACES = re.compile(r"convolution|conv\w*\dd|rnn|lstm|gru|batch_norm_backward")
"""Operators whose kernels unfold or lay out their arguments in memory of their own."""
_PRODUCTS = re.compile(r"^aten\.(mm|addmm|bmm|baddbmm|linear|matmul)\b")
_HALF = (torch.bfloat16, torch.float16)
"""In these a CPU lays out matrices once more before it multiplies them."""


Measured = dict[Any, KernelMemory | None]
"""What kernels took when they ran, by what they were given."""


def measured_if(wanted: bool) -> Measured | None:
    """Where what is measured is noted; raises `UsageError` where a profiler is running already."""
    if wanted and is_profiling():
        raise UsageError(
            "kernels cannot be measured while a profiler is running",
            why="measuring starts PyTorch's profiler, which would end that one",
            remedy="ask for it outside of the profiler",
        )
    return {} if wanted else None


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
        measured: Measured | None = None,
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
        """Storages that the forward makes and the backward reads, by what; not by what views them.

        What a checkpoint draws again is not kept: a program, which has no generators to rewind, reads it.
        """
        rows = self._read_by_backward
        return {base: self._real(found) for base, found in rows.items() if base not in self.redrawn}

    @cached_property
    def redrawn(self) -> dict[fx.Node, int]:
        """What checkpoints draw again in the backward, with the position of the first node that reads it."""
        return {
            base: min(self.place[row.node] for row in rows)
            for base, rows in self._read_by_backward.items()
            if any(_is_drawn(row.maker) and origin_of(row.node).recomputed for row in rows)
        }

    @cached_property
    def runs(self) -> list[list[fx.Node]]:
        """What each checkpoint computes again, for the derivative that asks for it."""
        rows = ((node, origin_of(node)) for node in self.nodes if node.op == "call_function")
        groups = groupby(rows, key=lambda row: (row[1].recomputed, row[1].forward))
        return [[node for node, _ in group] for (again, _), group in groups if again]

    @cached_property
    def _read_by_backward(self) -> dict[fx.Node, list[BackwardRead]]:
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
        return found

    def _real(self, rows: Sequence[BackwardRead]) -> tuple[BackwardRead, ...]:
        """Those that read the value itself, if any do: a view of it (`detach`) is read in its turn."""
        return tuple(row for row in rows if self._viewed(row.node) is None) or tuple(rows)

    def _bases(self, node: fx.Node, known: Mapping[fx.Node, tuple[fx.Node, ...]]) -> tuple[fx.Node, ...]:
        viewed = self._viewed(node) if node.op == "call_function" else None
        if (row := row_of(node)) is not node:
            return known[row] if self._viewed(row) is not None else (node,)
        if viewed is not None and len(node.args) > viewed:
            return tuple(base for source in nodes_in(node.args[viewed]) for base in known[source])
        return (node,)

    def _viewed(self, node: fx.Node) -> int | None:
        return viewed_argument(node, self._sizes)

    @cached_property
    def undecided(self) -> tuple[str, ...]:
        """The operations that may copy at other sizes and do not at these, or the other way round."""
        return tuple(node.name for node in self.nodes if depends_on_sizes(node, self._sizes))

    @cached_property
    def size(self) -> dict[fx.Node, int]:
        """The bytes of each storage; a row of results holds none, its items do."""
        bases = {base for row in self.bases.values() for base in row}
        return {node: self._size(node) for node in (*bases, *self._aside)}

    def _size(self, node: fx.Node) -> int:
        value, is_given = node.meta.get("val"), node.op != "call_function"
        if not isinstance(value, Tensor) or (is_given and self.graph is not self.program.graph):
            return 0
        kernel = self.kernel(row_of(node)) if _is_workspace(node) else None
        return bytes_at(value, self._sizes) if kernel is None else kernel.results[node.args[1]]  # type: ignore[index]

    def open_size(self, node: fx.Node) -> Any:
        """The bytes of a storage over the names of open sizes."""
        return open_bytes(node.meta["val"]) if self.size[node] else 0

    @property
    def has_more_than_shapes_say(self) -> bool:
        """Whether graphs inside take memory, or kernels were measured, at sizes that are numbers."""
        return self._measured is not None or any(any(held_graphs(node)) for node in self.nodes)

    def is_unknown(self, node: fx.Node) -> bool:
        """Whether nobody knows what memory a value takes."""
        return _is_workspace(node) and self.kernel(row_of(node)) is None

    def kernel(self, node: fx.Node) -> KernelMemory | None:
        """What the kernel of an operation took when it ran; None where it did not, or could not."""
        if self._measured is None or not has_memory_of_its_own(node):
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
        for node, (_, until) in self._held.items():
            for base in self.bases.get(node, ()):
                found[base] = max(found[base], until)
        returned = self.graph.output_node().all_input_nodes
        throughout = [node for node in self.nodes if node.op != "call_function"]
        for node in (*returned, *throughout, *self.grads):
            for base in self.bases[node]:
                found[base] = len(self.nodes)
        return found

    @cached_property
    def _held(self) -> dict[fx.Node, tuple[int, int]]:
        """Values that variables of Python hold longer than anybody reads them, and from where to where."""
        if self.graph is not self.program.graph:
            return {}
        unread, held = self.program.circumstances.unread, self.program.circumstances.held
        names = {node.name: node for node in self.nodes}
        for node in () if unread is None else unread.graph.nodes:  # and what they read
            names.setdefault(node.name, node)
        rows = ((name, *map(names.get, ends)) for name, ends in held.items() if name in names)
        return {
            names[name]: (self.place[first], self.place[last])
            for name, first, last in rows
            if first is not None and last is not None
        }

    @property
    def _aside(self) -> list[fx.Node]:
        """Those of them that are in no graph, for no result needs them."""
        return [node for node in self._held if node not in self.place]

    @cached_property
    def _derivatives(self) -> dict[int, range]:
        """For each node of the backward the nodes in a row that are the derivative of one operation."""
        found: dict[int, range] = {}
        for _, group in groupby(enumerate(self.nodes), key=lambda pair: _differentiates(pair[1])):
            places = [at for at, node in group if _differentiates(node)]
            found |= dict.fromkeys(places, range(places[0], places[-1] + 1)) if places else {}
        return found

    @cached_property
    def spans(self) -> dict[fx.Node, tuple[tuple[int, int], ...]]:
        """From which position to which each storage is there: inputs from the start, an item of a row with
        the whole row, and what is drawn again twice."""
        spans = {node: tuple(self._spans(node)) for node in self.size if node in self.bases}
        return spans | {node: (self._held[node],) for node in self._aside}

    def _spans(self, node: fx.Node) -> Iterator[tuple[int, int]]:
        first = self.place[row_of(node)] if node.op == "call_function" else 0
        if node in self.redrawn:
            yield first, self._last_before[node]
            first = self.redrawn[node]
        yield first, self.last[node]

    @cached_property
    def _last_before(self) -> dict[fx.Node, int]:
        """Of what is drawn again: the position of the last node that needs the first draw."""
        found: dict[fx.Node, int] = {}
        for at, node in enumerate(self.nodes):
            for base in {base for source in (*node.all_input_nodes, node) for base in self.bases[source]}:
                if at < self.redrawn.get(base, 0):
                    found[base] = at
        return found

    def meanwhile(self, node: fx.Node) -> int:
        """The bytes that are there only while a node runs: items that nobody reads, and what is inside."""
        row, kernel = node.meta.get("val"), self.kernel(node)
        unread = bytes_at(self._unread(node), self._sizes) + (0 if kernel is None else kernel.beside)
        inside = max((self._inside(graph) for _, graph in held_graphs(node)), default=0)
        if not is_branch(node):  # what the trip before it made is there beside it
            return unread + inside
        return unread + max(0, inside - bytes_at(row, self._sizes))

    def open_unread(self, node: fx.Node) -> Any:
        """The bytes of items that nobody reads, over the names of open sizes."""
        return open_bytes(self._unread(node))

    def _unread(self, node: fx.Node) -> list[Any]:
        row = node.meta.get("val")
        if not isinstance(row, (tuple, list)) or self._viewed(node) is not None:
            return []
        read = {user.args[1] for user in node.users if op_name(user.target) == "getitem"}
        return [item for at, item in enumerate(row) if at not in read]

    def _inside(self, graph: fx.GraphModule) -> int:
        return max(alive_in(Storages(self.program, self._sizes, graph, self._measured)), default=0)


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


def _is_drawn(node: fx.Node) -> bool:
    row = row_of(node)
    return draws(row.target, row.args, dict(row.kwargs))


def row_of(node: fx.Node) -> fx.Node:
    """The operation that makes a value; that of an item is the one that makes the row."""
    is_item = node.target is getitem and isinstance(node.args[0], fx.Node)
    return node.args[0] if is_item else node  # type: ignore[return-value]


def alive_in(storages: Storages) -> Iterator[int]:
    """The bytes that are alive while each node runs."""
    alive, begins, ends = 0, Counter[int](), Counter[int]()
    for node, size in storages.size.items():
        for first, last in storages.spans[node]:
            begins[first] += size
            ends[last] += size
    for at, node in enumerate(storages.nodes):
        alive += begins[at]
        yield alive + storages.meanwhile(node)
        alive -= ends[at]


def has_memory_of_its_own(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    name, value = op_name(node.target), node.meta.get("val")
    is_half = isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in _HALF
    return bool(_HAVE_WORKSPACES.search(name) or (is_half and _PRODUCTS.search(name)))


def _is_workspace(node: fx.Node) -> bool:
    """Whether a value is what a kernel keeps for its backward, in a size that no shape says."""
    row = row_of(node)
    return row is not node and said_of(row.target).workspace == node.args[1]

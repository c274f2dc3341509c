"""What the calls of a program cost: FLOPs, bytes moved, and the time that a device needs at least."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import (
    UnknownAtHand,
    has_open_sizes,
    is_symbolic,
    names_of_sizes,
    spelled_sum,
)
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.errors import UsageError
from whence.program import FlatProgram
from whence.program.node_records import origin_of, place_of
from whence.program.plain import AsJSON
from whence.program.queries.marks import READ_SIZES
from whence.program.queries.notebook import OpensInNotebook
from whence.reports.devices import Device, device_of
from whence.reports.flops import (
    Flops,
    bytes_at,
    flops_of,
    held_graphs,
    is_branch,
    open_bytes,
    open_flops,
    runs_of,
    trips_of,
)
from whence.reports.numbers import scaled
from whence.reports.views import depends_on_sizes, undecided_line, viewed_argument
from whence.schema import InputKind, Phase

RECOMPUTED = "recomputed"
"""What a checkpoint computes once more, in the backward."""


@dataclass(frozen=True)
class NodeCost:
    """What one operation costs: FLOPs, bytes read and written, and seconds where a device is named.

    That is for all its runs where it is repeated (`scan`, `map`). `beyond` are FLOPs that PyTorch's counter
    leaves out. One that is not `taken` is in a branch whose sibling takes more, and counts in no sum.
    """

    name: str
    phase: str
    flops: int
    read: int
    written: int
    seconds: float = 0.0
    beyond: int = 0
    taken: bool = True


@dataclass(frozen=True)
class CallCost(AsJSON):
    """What a call costs with the calls inside it.

    `parameters` counts elements, shared ones once, and `parameter_bytes` what they take. `flops` are by
    phase: forward, backward, recomputed, optimizer, each that the call has operations of. What an optimizer
    does counts for the module whose parameter it updates. `read` and `written` are bytes, of every operation
    by itself; `seconds` what a named device takes at least.
    """

    path: str
    index: int
    type: str
    depth: int
    parameters: int = 0
    parameter_bytes: int = 0
    flops: Mapping[str, int] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    seconds: float | None = None

    @property
    def total_flops(self) -> int:
        """All phases."""
        return sum(self.flops.values())

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is read or written."""
        moved = self.read + self.written
        return self.total_flops / moved if moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "flops": dict(self.flops), "intensity": self.intensity}


@dataclass(frozen=True)
class UnreadCost(AsJSON):
    """What operations of one operator, call and line take that eager runs and no result needs."""

    operator: str
    phase: str
    call: str
    line: str
    operations: int
    flops: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def _alike(rows: Iterable[UnreadCost]) -> Iterator[str]:
    """Those of one operator and line together, whatever calls they are in."""
    found: dict[tuple[str, str, str], list[UnreadCost]] = {}
    for row in rows:
        found.setdefault((row.operator, row.phase, row.line), []).append(row)
    for first, *others in found.values():
        count = sum(row.operations for row in (first, *others))
        several = f" (× {count:,})" if count > 1 else ""
        call = first.call or "the model's own code"
        place = ", ".join(filter(None, (f"{call} …" if others else call, first.line)))
        flops = scaled(sum(row.flops for row in (first, *others)))
        yield f"{flops}FLOPs in the {first.phase}, {first.operator}{several} in {place}"


@dataclass(frozen=True, repr=False)
class Cost(OpensInNotebook, AsJSON):
    """What a program costs: a row for each call, callers before what they call; the first is the program.

    `gaps` names operators whose FLOPs nobody has a formula for, with how often they occur: they count as
    none. `beyond` are FLOPs by operator that PyTorch's own counter leaves out, and that are counted here.
    `branches` says for each `cond` what its graphs take: the largest counts. Where sizes are open, `formulas`
    are the totals over their names, as Python source (`forward FLOPs`, `bytes read`, `bytes written`), at
    sizes of two and more; those are left out to which an operator without such a formula adds, or a graph
    inside. No bytes have one where `undecided` names operations: reshapes that copy at some sizes alone.
    `unread` are FLOPs of the model that no result needs: eager computes them besides, and they are in no sum;
    their formulas are called `unread forward FLOPs` and the like.
    """

    rows: tuple[CallCost, ...]
    nodes: tuple[NodeCost, ...]
    gaps: Mapping[str, int]
    beyond: Mapping[str, int]
    device: str | None = None
    branches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()
    unread: tuple[UnreadCost, ...] = ()

    @property
    def total(self) -> CallCost:
        """The whole program."""
        return self.rows[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, **self.said(), "device": self.device}

    def said(self) -> dict[str, Any]:
        """What is to be said of the numbers, as plain data."""
        branches = {name: dict(graphs) for name, graphs in self.branches.items()}
        told = {"gaps": dict(self.gaps), "beyond": dict(self.beyond), "branches": branches}
        told |= {"formulas": dict(self.formulas), "undecided": list(self.undecided)}
        return {**told, "unread": [row.to_dict() for row in self.unread]}

    def __repr__(self) -> str:
        moved = scaled(self.total.read + self.total.written)
        return f"<Cost: {scaled(self.total.total_flops)}FLOPs, {moved}B moved>"

    def __str__(self) -> str:
        """FLOPs by phase, bytes moved, and what the numbers leave out; `program.report()` has the calls."""
        phases = ", ".join(f"{phase} {scaled(count)}FLOPs" for phase, count in self.total.flops.items())
        moved = f"read {scaled(self.total.read)}B, written {scaled(self.total.written)}B"
        seconds = (
            "" if self.total.seconds is None else f", at least {self.total.seconds:.3g} s on {self.device}"
        )
        return f"{phases or 'no FLOPs'}; {moved}{seconds}\n{self.notes()}".rstrip()

    def notes(self) -> str:
        """What is counted beyond PyTorch's counter, and what is not known."""
        beyond = ", ".join(f"{name} {scaled(count)}" for name, count in self.beyond.items())
        lines = [f"counted here, and not by torch.utils.flop_counter: {beyond}"] if beyond else []
        lines += [f"{name}: {formula}" for name, formula in self.formulas.items()]
        lines += [undecided_line(self.undecided)] if self.undecided else []
        for name, graphs in self.branches.items():
            told = ", ".join(f"{graph} {scaled(count)}FLOPs" for graph, count in graphs.items())
            lines.append(f"{name} takes one of its graphs, and the largest counts: {told}")
        lines += [f"eager also computes {row}, which no result needs" for row in _alike(self.unread)]
        if self.total.flops.get(Phase.OPTIMIZER) == 0:
            lines.append("the optimizer's operations are element-wise, which count as no FLOPs")
        lines += [f"FLOPs not known: {gap} (× {count})" for gap, count in self.gaps.items()]
        return "\n".join(lines)


def cost_of(
    program: FlatProgram, device: str | Device | None = None, sizes: Mapping[str, int] | None = None
) -> Cost:
    """Read from shapes alone; nothing runs. Raises `UsageError` for sizes that are known to no one."""
    found = device_of(device)
    counting = _Counting(checked_sizes(program, sizes), found)
    with data_named(program, sizes):
        counting.count(program.graph_module, 1)
        rows = tuple(_call_costs(program, counting.nodes, counting.sizes, found))
        unread = dict(_unread(program, counting))
    beyond: Counter[str] = Counter()
    for node, cost in counting.nodes:
        if cost.beyond and cost.taken:
            beyond[op_name(node.target)] += cost.beyond
    nodes, name = tuple(cost for _, cost in counting.nodes), found.name if found else None
    undecided = tuple(node.name for node, _ in counting.nodes if depends_on_sizes(node, counting.sizes))
    formulas = _formulas(program, counting.nodes, undecided)
    formulas |= _unread_formulas(unread) if formulas else {}
    rest = tuple(_unread_rows(unread))
    return Cost(rows, nodes, counting.gaps, beyond, name, counting.branches, formulas, undecided, rest)


def _unread(program: FlatProgram, counting: "_Counting") -> Iterator[tuple[fx.Node, int]]:
    """The FLOPs of operations that no result needs."""
    unread = program.circumstances.unread
    for node in () if unread is None else unread.graph.nodes:
        if node.op == "call_function" and (cost := flops_of(node, counting.sizes, counting.known)).count:
            yield node, cost.count


def _unread_rows(unread: Mapping[fx.Node, int]) -> Iterator[UnreadCost]:
    """Those of one operator, call and line together."""
    found: dict[tuple[str, ...], list[int]] = {}
    for node, count in unread.items():
        place = place_of(node)
        key = op_name(node.target), phase_of(node), place.module or "", place.line or ""
        found.setdefault(key, []).append(count)
    for (operator, phase, call, line), counts in found.items():
        yield UnreadCost(operator, phase, call, line, len(counts), sum(counts))


def _unread_formulas(unread: Mapping[fx.Node, int]) -> dict[str, str]:
    """The same over the names of open sizes, by phase."""
    terms: dict[str, Counter[Any]] = {}
    for node, count in unread.items():
        values = (each.meta.get("val") for each in (node, *node.all_input_nodes))
        flops = open_flops(node) if any(map(is_open, values)) else count
        terms.setdefault(f"unread {phase_of(node)} FLOPs", Counter())[flops] += 1
    return {name: spelled_sum(found) for name, found in terms.items() if None not in found}


@dataclass
class _Counting:
    """The costs of nodes, graph by graph, those of a nested graph before the node that runs it."""

    sizes: Mapping[str, int]
    device: Device | None
    nodes: list[tuple[fx.Node, NodeCost]] = field(default_factory=list)
    gaps: Counter[str] = field(default_factory=Counter)
    branches: dict[str, dict[str, int]] = field(default_factory=dict)
    known: dict[Any, Flops] = field(default_factory=dict)

    def count(self, module: fx.GraphModule, times: int) -> None:
        """All nodes of a graph that runs so often."""
        spans: dict[fx.Node, slice] = {}
        for node in module.graph.nodes:
            if (inner := nested_graph(node)) is not None:
                start = len(self.nodes)
                self.count(inner, times * trips_of(node, self.sizes))
                spans[node] = slice(start, len(self.nodes))
            elif node.op == "call_function":
                if is_branch(node):
                    self._choose(node, {source: spans[source] for source, _ in held_graphs(node)})
                self.nodes.append((node, self._cost(node, times)))

    def _cost(self, node: fx.Node, times: int) -> NodeCost:
        name, phase, at = node.name, phase_of(node), self.sizes
        if any(held_graphs(node)):  # whose nodes count
            if runs_of(node, at) is None:
                self.gaps[
                    f"{op_name(node.target)}: how often its graphs run is not known, they count once"
                ] += 1
            return NodeCost(name, phase, 0, 0, 0)
        flops = flops_of(node, at, self.known)
        if flops.gap is not None:
            self.gaps[f"{op_name(node.target)}: {flops.gap}"] += 1
        count, beyond = flops.count * times, flops.beyond * times
        is_moved = op_name(node.target) != "getitem" and viewed_argument(node, at) is None
        if not is_moved or getattr(node.target, "overloadpacket", None) in READ_SIZES:
            return NodeCost(name, phase, count, 0, 0, beyond=beyond)
        value = node.meta.get("val")
        read = sum(bytes_at(source.meta.get("val"), at) for source in node.all_input_nodes)
        written, device = bytes_at(value, at), self.device
        seconds = device.seconds(flops.count, read + written, _dtype(node)) * times if device else 0.0
        return NodeCost(name, phase, count, read * times, written * times, seconds, beyond)

    def _choose(self, node: fx.Node, spans: Mapping[fx.Node, slice]) -> None:
        """Of branches the one that takes the most FLOPs counts, and the most bytes where that is alike."""
        takes = {
            source.name: (
                sum(cost.flops for _, cost in self.nodes[span] if cost.taken),
                sum(cost.read + cost.written for _, cost in self.nodes[span] if cost.taken),
            )
            for source, span in spans.items()
        }
        largest = max(takes, key=lambda name: takes[name], default="")
        self.branches[node.name] = {name: flops for name, (flops, _) in takes.items()}
        for source, span in spans.items():
            if source.name != largest:
                self.nodes[span] = [(each, replace(cost, taken=False)) for each, cost in self.nodes[span]]


def _formulas(
    program: FlatProgram, nodes: Iterable[tuple[fx.Node, NodeCost]], undecided: Container[str]
) -> dict[str, str]:
    """The totals over the names of open sizes, where there are any."""
    terms: dict[str, Counter[Any]] = {}
    unknown = set[str]()
    opened = {node for node in program.nodes() if is_open(node.meta.get("val"))}
    if not opened:
        return {}
    for node, cost in nodes:
        name, moves = f"{cost.phase} FLOPs", bool(cost.read or cost.written)
        figures = {name: cost.flops, "bytes read": cost.read, "bytes written": cost.written}
        around = (node, *node.all_input_nodes)
        if not opened.isdisjoint(around):
            values = [each.meta.get("val") for each in around]
            written, *read = [open_bytes(value) if moves else 0 for value in values]
            flops = open_flops(node) if cost.flops else 0
            figures = {name: flops, "bytes read": sum(read), "bytes written": written}
            unknown |= {name} if flops is None else set()
        if node.name in undecided:
            unknown |= {"bytes read", "bytes written"}
        if node.graph is not program.graph:  # which may run as often as a size says
            unknown |= set(figures)
        for key, figure in figures.items():
            terms.setdefault(key, Counter())[figure] += 1 if figure is not None else 0
    return {name: spelled_sum(found) for name, found in terms.items() if name not in unknown}


def is_open(value: Any) -> bool:
    """Whether a value has open sizes, or is one."""
    leaves = [value] if isinstance(value, Tensor) and not is_composed(value) else tree_flatten(value)[0]
    return any(has_open_sizes(leaf) if isinstance(leaf, Tensor) else is_symbolic(leaf) for leaf in leaves)


def checked_sizes(program: FlatProgram, sizes: Mapping[str, int] | None) -> Mapping[str, int]:
    """The sizes that were given; raises `UsageError` for names that no size has, and for no sizes."""
    if not sizes:
        return {}
    known = _names_of(program.nodes())
    if wrong := [name for name in sizes if name not in known]:
        names = ", ".join(sorted(known)) or "none: all sizes are fixed"
        raise UsageError(f"no open size is called {', '.join(wrong)}", remedy=f"open sizes are {names}")
    if wrong := [f"{name}={size!r}" for name, size in sizes.items() if not _is_size(size)]:
        raise UsageError(f"no size can be {', '.join(wrong)}", remedy="give whole numbers from 0 on")
    return sizes


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _names_of(nodes: Iterable[fx.Node]) -> set[str]:
    return {name for node in nodes for name in names_of_sizes(node.meta.get("val"))}


@contextmanager
def data_named(program: FlatProgram, sizes: Mapping[str, int] | None) -> Iterator[None]:
    """Sizes that data decide are an error that names all of them: those of no input, and not given."""
    try:
        yield
    except UnknownAtHand as unknown:
        of_inputs = _names_of(node for node in program.graph.nodes if node.op == "placeholder")
        given = {**dict.fromkeys(_names_of(program.nodes()) - of_inputs, 8), **(sizes or {})}
        missing = sorted(given.keys() - (sizes or {}).keys()) or [str(unknown)]
        raise UsageError(
            f"{', '.join(missing)}: {'sizes' if missing[1:] else 'a size'} that data decide",
            remedy=f"say which it is to be: sizes={given or {str(unknown): 8}}",
        ) from unknown


def phase_of(node: fx.Node) -> str:
    """The phase of a node, where what is recomputed is one of its own."""
    origin = origin_of(node)
    return RECOMPUTED if origin.recomputed else origin.phase.value


def _dtype(node: fx.Node) -> str:
    """That of what is multiplied, the narrowest: scales, what is added and the result may be wider."""
    values = [source.meta.get("val") for source in (*node.all_input_nodes, node)]
    tensors = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
    real = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.ndim > 1]
    found = min(real, key=lambda dtype: dtype.itemsize, default=torch.float32)
    return str(found).removeprefix("torch.")


def _call_costs(
    program: FlatProgram, nodes: list[tuple[fx.Node, NodeCost]], at: Mapping[str, int], device: Device | None
) -> Iterator[CallCost]:
    calls = program.calls
    flops: list[Counter[str]] = [Counter() for _ in calls.rows]
    sums = [[0, 0, 0.0] for _ in calls.rows]
    for node, cost in nodes:
        if cost.taken:
            number = calls.number(origin_of(node).made_in)
            flops[number][cost.phase] += cost.flops
            for place, figure in enumerate((cost.read, cost.written, cost.seconds)):
                sums[number][place] += figure
    for call in reversed(calls.rows[1:]):  # a caller comes before what it calls
        for phase, count in flops[call.number].items():
            flops[call.parent][phase] += count
        sums[call.parent] = [sum(pair) for pair in zip(sums[call.parent], sums[call.number], strict=True)]
    held = _parameters_by_module(program)
    for call in calls.rows:
        own = held.get(tuple(call.site.path), ())
        read, written, seconds = sums[call.number]
        order = [phase for phase in (*Phase, RECOMPUTED) if str(phase) in flops[call.number]]
        yield CallCost(
            path=str(call.site.path),
            index=call.site.index,
            type=call.site.type,
            depth=len(calls.chain(call)),
            parameters=sum(int(value.numel()) for value in own),
            parameter_bytes=sum(bytes_at(value, at) for value in own),
            flops={str(phase): flops[call.number][str(phase)] for phase in order},
            read=int(read),
            written=int(written),
            seconds=seconds if device else None,
        )


def _parameters_by_module(program: FlatProgram) -> dict[tuple[str, ...], list[Any]]:
    """The parameters in each module, by path; one that has several names there is in it once."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for row in program.signature.state:
        if row.kind is InputKind.PARAMETER:
            for above in {tuple(above) for path in row.attribute_paths for above in path.prefixes()}:
                found.setdefault(above, []).append(row.value)
    return found

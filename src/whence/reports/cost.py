"""What the calls of a program cost: FLOPs, bytes moved, and the time that a device needs at least."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import op_name, traits
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import UnknownAtHand, names_of_sizes
from whence.errors import UsageError
from whence.program import Program
from whence.program.node_records import origin_of
from whence.program.queries.notebook import OpensInNotebook
from whence.reports.devices import Device, device_of
from whence.reports.flops import bytes_at, flops_of
from whence.reports.modules import calls_around
from whence.reports.numbers import scaled
from whence.schema import InputKind, Phase

aten = torch.ops.aten
RECOMPUTED = "recomputed"
"""What a checkpoint computes once more, in the backward."""
_UNSAID = frozenset((aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk))


@dataclass(frozen=True)
class NodeCost:
    """What one operation costs: FLOPs, bytes read and written, and seconds where a device is named."""

    name: str
    phase: str
    flops: int
    read: int
    written: int
    seconds: float = 0.0


@dataclass(frozen=True)
class CallCost:
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


@dataclass(frozen=True, repr=False)
class Cost(OpensInNotebook):
    """What a program costs: a row for each call, callers before what they call; the first is the program.

    `gaps` names operators whose FLOPs nobody has a formula for, with how often they occur: they count as
    none. `beyond` are FLOPs by operator that PyTorch's own counter leaves out, and that are counted here.
    """

    rows: tuple[CallCost, ...]
    nodes: tuple[NodeCost, ...]
    gaps: Mapping[str, int]
    beyond: Mapping[str, int]
    device: str | None = None

    @property
    def total(self) -> CallCost:
        """The whole program."""
        return self.rows[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, "gaps": dict(self.gaps), "beyond": dict(self.beyond), "device": self.device}

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
        if self.total.flops.get(Phase.OPTIMIZER) == 0:
            lines.append("the optimizer's operations are element-wise, which count as no FLOPs")
        lines += [f"FLOPs not known: {gap} (× {count})" for gap, count in self.gaps.items()]
        return "\n".join(lines)


def cost_of(
    program: Program, device: str | Device | None = None, sizes: Mapping[str, int] | None = None
) -> Cost:
    """Read from shapes alone; nothing runs. Raises `UsageError` for sizes that are known to no one."""
    found, at = device_of(device), checked_sizes(program, sizes)
    gaps: Counter[str] = Counter()
    beyond: Counter[str] = Counter()
    with data_named():
        operations = (node for node in program.nodes() if node.op == "call_function")
        nodes = [(node, _cost(node, at, found, gaps, beyond)) for node in operations]
        rows = tuple(_rows(program, nodes, at, found))
    return Cost(rows, tuple(cost for _, cost in nodes), gaps, beyond, found.name if found else None)


def checked_sizes(program: Program, sizes: Mapping[str, int] | None) -> Mapping[str, int]:
    """The sizes that were given; raises `UsageError` for names that no size has, and for no sizes."""
    known = {name for node in program.nodes() for name in names_of_sizes(node.meta.get("val"))}
    wrong = [name for name, size in (sizes or {}).items() if name not in known or size < 0]
    if wrong:
        names = ", ".join(sorted(known)) or "none: all sizes are fixed"
        raise UsageError(f"no open size can be {', '.join(wrong)}", remedy=f"open sizes are {names}")
    return sizes or {}


@contextmanager
def data_named() -> Iterator[None]:
    """A size that data decide is an error that names it."""
    try:
        yield
    except UnknownAtHand as unknown:
        raise UsageError(
            f"the size {unknown} is decided by data",
            remedy=f"say which it is to be: sizes={{'{unknown}': 8}}",
        ) from unknown


def phase_of(node: fx.Node) -> str:
    """The phase of a node, where what is recomputed is one of its own."""
    origin = origin_of(node)
    return RECOMPUTED if origin.recomputed else origin.phase.value


def _cost(
    node: fx.Node, at: Mapping[str, int], device: Device | None, gaps: Counter[str], beyond: Counter[str]
) -> NodeCost:
    flops = flops_of(node, at)
    if flops.gap is not None:
        gaps[f"{op_name(node.target)}: {flops.gap}"] += 1
    if flops.beyond:
        beyond[op_name(node.target)] += flops.beyond
    if viewed_argument(node.target) is not None or op_name(node.target) == "getitem":
        return NodeCost(node.name, phase_of(node), flops.count, 0, 0)
    value = node.meta.get("val")
    read = sum(bytes_at(source.meta.get("val"), at) for source in node.all_input_nodes)
    written = bytes_at(value, at)
    seconds = device.seconds(flops.count, read + written, _dtype(value)) if device else 0.0
    return NodeCost(node.name, phase_of(node), flops.count, read, written, seconds)


def viewed_argument(target: Any) -> int | None:
    """The argument in whose memory the result of an operator lies; schemas of a few do not say so."""
    return 0 if getattr(target, "overloadpacket", None) in _UNSAID else traits(target).viewed


def _dtype(value: Any) -> str:
    tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"


def _rows(
    program: Program, nodes: list[tuple[fx.Node, NodeCost]], at: Mapping[str, int], device: Device | None
) -> Iterator[CallCost]:
    calls = program.calls
    flops: list[Counter[str]] = [Counter() for _ in calls.rows]
    sums = [[0, 0, 0.0] for _ in calls.rows]
    for node, cost in nodes:
        for number in calls_around(calls, origin_of(node)):
            flops[number][cost.phase] += cost.flops
            for place, figure in enumerate((cost.read, cost.written, cost.seconds)):
                sums[number][place] += figure
    held = _parameters(program)
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


def _parameters(program: Program) -> dict[tuple[str, ...], list[Any]]:
    """The parameters in each module, by path; one that has several names there is in it once."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for row in program.signature.state:
        if row.kind is InputKind.PARAMETER:
            for above in {tuple(above) for path in row.attribute_paths for above in path.prefixes()}:
                found.setdefault(above, []).append(row.value)
    return found

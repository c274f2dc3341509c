"""What memory a program takes: what the backward keeps of the forward, and the peak by liveness.

What kernels need for themselves meanwhile, and what of it they keep for the backward, is in no shape: it is
named (`gaps`), or measured, where somebody asks for that and the kernels are those of this CPU: each runs
once on zeros. What an allocator rounds up is not counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.program import FlatProgram
from whence.program.node_records import origin_of, place_of
from whence.program.plain import AsJSON
from whence.program.queries.notebook import OpensInNotebook
from whence.reports.cost import checked_sizes, data_named
from whence.reports.memory.formulas import formulas_in
from whence.reports.memory.storages import Storages, alive_in, has_memory_of_its_own, measured_if, row_of
from whence.reports.numbers import scaled
from whence.reports.views import undecided_line
from whence.schema import InputKind, OutputKind, Phase, Quality

_KINDS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.CONSTANT: "buffers",
    InputKind.OPTIMIZER_STATE: "optimizer state",
}

_SHOWN = 5
_REMEDY = "measure=True (--measure) runs such kernels once, where they are this CPU's, and counts it"


@dataclass(frozen=True)
class Kept:
    """A value of the forward that the backward reads: the call and line that made it, and who reads it.

    `consumers` are the operations that read it, in order, through views of it, and `consumer` is the first.

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
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Memory(OpensInNotebook, AsJSON):
    """The memory of a program, in bytes.

    `kept` are the activations that the backward reads, largest first; weights and inputs are there anyway.
    `peak` is the most that is alive at once, `at` the node that runs then, `where` its call and line, and
    `parts` what it consists of: parameters, buffers, inputs, optimizer state, gradients, activations,
    temporaries. `timeline` says for each node how much is alive while it runs. `gaps` names what takes memory
    besides that nobody knows, with how often it occurs: it counts as none. Where sizes are open, `formulas`
    are `kept bytes` and `peak bytes` over their names, as Python source. Where the peak is may depend on
    sizes: `peaks` says for each node that can have it what is alive then; it is the largest of them, and in
    `formulas` if it is one alone. They hold at sizes of two and more, and there are none where `undecided`
    names operations: reshapes that copy at some sizes alone.
    """

    kept: tuple[Kept, ...]
    peak: int
    at: str
    where: str
    parts: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]
    gaps: Mapping[str, int] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    peaks: Mapping[str, str] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """All that is kept for the backward."""
        return sum(row.bytes for row in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = {"parts": dict(self.parts), "gaps": dict(self.gaps), "kept_bytes": self.kept_bytes}
        plain |= {"formulas": dict(self.formulas), "peaks": dict(self.peaks)}
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
        besides = [f"{name}: {formula}" for name, formula in self.formulas.items()]
        several = f"the peak is at one of {len(self.peaks)} places, by sizes: `memory().peaks` has formulas"
        besides += [several] if len(self.peaks) > 1 else []
        besides += [undecided_line(self.undecided)] if self.undecided else []
        besides += [f"memory not known: {gap} (× {count})" for gap, count in self.gaps.items()]
        besides += [_REMEDY] if any("kernel" in gap for gap in self.gaps) else []
        return "\n".join([peak, *map(_kept_line, largest[:_SHOWN]), *besides])


def _kept_line(rows: Sequence[Kept]) -> str:
    first, times = rows[0], f" × {len(rows)}" if len(rows) > 1 else ""
    place = f"{first.call}{' …' if times else ''}, {first.line}"
    more = f", and {len(first.consumers) - 1} more" if len(first.consumers) > 1 else ""
    size = f"{scaled(first.bytes)}B" if first.known else "of unknown size"
    return f"kept {size}{times}: {first.operation} in {place}, which {first.reads}{more}"


def memory_of(
    program: FlatProgram, sizes: Mapping[str, int] | None = None, *, measure: bool = False
) -> Memory:
    """Read from shapes alone; nothing runs, but for kernels that are to be measured."""
    with data_named(program, sizes):
        return memory_in(Storages(program, checked_sizes(program, sizes), measured=measured_if(measure)))


def memory_in(storages: Storages) -> Memory:
    timeline, top = [], (-1, 0)
    formulas, peaks = formulas_in(storages)
    for at, alive in enumerate(alive_in(storages)):
        timeline.append((storages.nodes[at].name, alive))
        top = max(top, (alive, -at))
    peak, at = top[0], -top[1]
    node = storages.nodes[at]
    return Memory(
        kept=tuple(sorted(_storages_kept(storages), key=lambda row: (-row.bytes, row.node))),
        peak=peak,
        at=node.name,
        where=str(place_of(node)),
        parts=_memory_by_part(storages, at),
        timeline=tuple(timeline),
        gaps=_gaps(storages),
        formulas=formulas,
        peaks=peaks,
        undecided=storages.undecided,
    )


def _gaps(storages: Storages) -> dict[str, int]:
    """What kernels keep for themselves while they run, checkpoints beside their arguments, and autograd while
    it differentiates a write through a view, or for a value that the model made a leaf."""
    found = Counter[str]()
    for node in storages.nodes:
        if has_memory_of_its_own(node) and storages.kernel(node) is None:
            found[f"{op_name(node.target)}: what its kernel needs meanwhile"] += 1
        if storages.is_unknown(node):
            found[f"{op_name(row_of(node).target)}: the workspace that it keeps for the backward"] += 1
    for is_copying, nodes in groupby(storages.nodes, key=_is_of_autograd):
        if is_copying and any(op_name(node.target) == "aten.clone.default" for node in nodes):
            found["a write through a view: what its derivative copies"] += 1
    unread = storages.program.circumstances.unread
    if unread is not None and (count := sum(map(_is_gradient, unread.graph.nodes))):
        found["gradients that no result needs: they, and what eager keeps for them"] = count
    if storages.runs:
        found["checkpoint: the states of generators that it keeps"] = len(storages.runs)
    return dict(found)


def _is_gradient(node: fx.Node) -> bool:
    origin = origin_of(node)
    return node.op == "call_function" and origin.forward is not None and not origin.recomputed


def _is_of_autograd(node: fx.Node) -> bool:
    """Whether autograd itself computes it, of no operation of the forward: that a view is written again."""
    origin = origin_of(node)
    known = origin.forward or origin.source or origin.recomputed
    return origin.phase is Phase.BACKWARD and not known and origin.quality is Quality.EXACT


def _storages_kept(storages: Storages) -> Iterator[Kept]:
    for base, readings in storages.readings.items():
        maker, source, node = readings[0]
        yield Kept(
            node=maker.name,
            operation=op_name(maker.target),
            call=place_of(maker).module or "the model's own code",
            line=place_of(maker).line or "",
            consumer=node.name,
            reads=f"{op_name(node.target)} reads as {source.name}",
            bytes=storages.size.get(base, 0),
            known=not storages.is_unknown(base),
            consumers=tuple(dict.fromkeys(reading.node.name for reading in readings)),
        )


def _memory_by_part(storages: Storages, at: int) -> dict[str, int]:
    program = storages.program
    rows = (*program.signature.inputs, *program.signature.attributes)
    kinds = {row.name: _KINDS.get(row.kind, "inputs") for row in rows}
    returned = [row.node for row in program.signature.outputs_of(OutputKind.GRADIENT) if row.node]
    held = (*map(program.node, returned), *storages.grads)
    gradients = {base for node in held for base in storages.bases[node]}
    parts = {"temporaries": storages.meanwhile(storages.nodes[at])}
    for node, size in storages.size.items():
        if not any(first <= at <= last for first, last in storages.spans[node]):
            continue
        if node.op != "call_function":
            kind = kinds.get(node.name, "inputs")
        elif node in gradients:
            kind = "gradients"
        else:
            kind = "activations" if node in storages.readings else "temporaries"
        parts[kind] = parts.get(kind, 0) + size
    return dict(sorted(parts.items()))

"""Everything of a program that names nodes, under the names that a pass left."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from whence._torch.graphs import returned
from whence._torch.operators.schemas import keeps_its_place, reads_memory
from whence.program import (
    Absent,
    Adjoint,
    Call,
    Contribution,
    FlatProgram,
    GraphFacts,
    Named,
    Output,
    Structure,
)
from whence.program.calls import Leaf
from whence.program.node_records import origin_of, write_facts
from whence.program.wellformed import Broken
from whence.rewriting.edits.after import After
from whence.rewriting.edits.before import WorkingCopy
from whence.rewriting.edits.origins import NodeSources
from whence.schema import OutputKind, Phase

P = TypeVar("P", bound=FlatProgram)
_GONE = "a pass removed the value"


@dataclass(frozen=True)
class NamesNow:
    """Where the values of before are now."""

    old: WorkingCopy
    now: After

    def get(self, name: str) -> str | None:
        """The name of the node that holds the value now, if there is one."""
        image = self.now.image(name)
        return None if image is None else image.name

    def all(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The present names of those that are there."""
        return tuple(dict.fromkeys(found for name in names if (found := self.get(name)) is not None))


def carried(program: P, old: WorkingCopy, now: After, module: fx.GraphModule, sources: NodeSources) -> P:
    """The program over the graph that a pass left, whose new nodes come from these `sources`."""
    names = NamesNow(old, now)
    outputs = tuple(_outputs_carried(program, now))
    calls = replace(program.calls, rows=tuple(_call(row, names) for row in program.calls.rows))
    held = {row.of: row.node for row in outputs if row.kind is OutputKind.MUTATION}
    write_facts(now.graph, _facts(program, now, names, held, sources))
    reads = any(reads_memory(node.target) for node in now.graph.nodes)
    return program.with_changes(
        graph_module=module,
        signature=replace(program.signature, outputs=outputs),
        calls=calls,
        convention=replace(program.convention, reads_memory=reads, any_layout=frozenset()),
        guards=program.guards.laid_out(),
        result=_carried_result(program, outputs),
        circumstances=replace(program.circumstances, replay=replace(program.replay, known=None)),
    )


def _facts(
    program: FlatProgram,
    now: After,
    names: NamesNow,
    held: Mapping[str | None, str | None],
    sources: NodeSources,
) -> GraphFacts:
    facts = program.facts
    adjoints = {value: _adjoint(adjoint, names) for value, adjoint in facts.adjoints.items()}
    return GraphFacts(
        seed=None if facts.seed is None else names.get(facts.seed),
        adjoints={
            found: adjoint
            for value, adjoint in adjoints.items()
            if adjoint is not None and (found := names.get(value)) is not None
        },
        unclear=facts.unclear | _unclear(program, adjoints, names),
        histories={name: _history(names, values, held.get(name)) for name, values in facts.histories.items()},
        written=_later_values(program, names),
        differentiable=frozenset(names.all(tuple(facts.differentiable))),
        straight_through=frozenset(names.all(tuple(facts.straight_through))),
        behind=frozenset(names.all(tuple(facts.behind))),
        turned_on=frozenset(_within(facts.turned_on, now, sources)),
        turned_off=frozenset(_within(facts.turned_off, now, sources)),
    )


def _within(marked: frozenset[str], now: After, sources: NodeSources) -> Iterator[str]:
    """What has a grad mode of its own, whatever its caller's is: what had it, and what is made of such
    alone."""
    yield from (node.name for name, node in now.kept.items() if name in marked)
    yield from (node.name for node, names in sources.of.items() if marked.issuperset(names))


def _later_values(program: FlatProgram, names: NamesNow) -> dict[str, tuple[str, ...]]:
    """The later values of what is written in between: those of values that became one are one row."""
    merged: dict[str, tuple[str, ...]] = {}
    for name, values in program.facts.written.items():
        found = names.get(name)
        later = tuple(value for value in names.all(values) if value != found)
        if found is not None and later:
            merged[found] = tuple(dict.fromkeys((*merged.get(found, ()), *later)))
    return merged


def _outputs_carried(program: FlatProgram, now: After) -> Iterator[Output]:
    for row, value in zip(program.signature.outputs, returned(now.graph) or (), strict=True):
        yield replace(row, node=value.name) if isinstance(value, fx.Node) else row


def _carried_result(program: FlatProgram, outputs: tuple[Output, ...]) -> Structure:
    rows = (row for row in outputs if row.kind is OutputKind.USER)
    leaves: list[Leaf] = [
        leaf if row.node is None else Named(row.node)
        for leaf, row in zip(program.result.leaves, rows, strict=True)
    ]
    return Structure(program.result.spec, tuple(leaves))


def _history(names: NamesNow, values: tuple[str, ...], last: str | None) -> tuple[str, ...]:
    kept = names.all(values[:-1])
    return tuple(dict.fromkeys((*kept, last))) if last is not None else names.all(values)


def _call(row: Call, names: NamesNow) -> Call:
    """A call that takes and returns the values that hold now what it took and returned."""
    if row.number == 0:
        return row
    inputs = None if row.inputs is None else _structure(row.inputs, names)
    outputs = None if row.outputs is None else _structure(row.outputs, names)
    if outputs is not None and inputs is not None:
        outputs = _reachable(outputs, inputs, names, row)
    return replace(row, inputs=inputs, outputs=outputs)


def _structure(structure: Structure, names: NamesNow) -> Structure:
    found: dict[str, Leaf] = {}
    for name in structure.names:
        image = names.now.image(name)
        found[name] = Absent(_GONE) if image is None else Named(image.name)
    return structure.renamed(found)


def _reachable(outputs: Structure, inputs: Structure, names: NamesNow, row: Call) -> Structure:
    """What a call returns and no longer makes itself is absent, unless it is given it."""
    calls, now = names.old.program.calls, {node.name: node for node in names.now.graph.nodes}

    def has(name: str) -> bool:
        node = now[name]
        if node.op in ("placeholder", "get_attr") or name in inputs.names:
            return True
        return row.number <= calls.number(origin_of(node).place) < calls.ends[row.number]

    own = {name for name in outputs.names if name not in names.old.nodes or names.get(name) != name}
    lost: dict[str, Leaf] = {
        name: Absent(f"since a pass, {name} is computed outside the call") for name in own if not has(name)
    }
    return outputs.renamed(lost)


def _adjoint(adjoint: Adjoint, names: NamesNow) -> Adjoint | None:
    """The contributions under their present names; None where one of them is not there by itself."""
    parts = []
    for part in adjoint.contributions:
        node, total = names.get(part.node), None if part.sum is None else names.get(part.sum)
        if node is None or (part.sum is not None and total is None):
            return None
        parts.append(Contribution(node, part.scope, total))
    return Adjoint(tuple(parts))


def _unclear(
    program: FlatProgram, adjoints: Mapping[str, Adjoint | None], names: NamesNow
) -> frozenset[tuple[str, int]]:
    """The values, and the calls that contribute to them, whose gradients cannot be told apart any more."""
    return frozenset(
        (found, part.scope)
        for value, adjoint in adjoints.items()
        if adjoint is None and (found := names.get(value)) is not None
        for part in program.facts.adjoints[value].contributions
    )


def carried_faults(old: WorkingCopy, now: After) -> Iterator[Broken]:
    """What a program needs, and has no place for when it is gone."""
    program = old.program
    yield from _lost_draws(old, now)
    seed = None if program.facts.seed is None else now.image(program.facts.seed)
    if program.facts.seed is not None and (seed is None or origin_of(seed).phase is not Phase.BACKWARD):
        yield Broken(
            f"the seed of the backward, {program.facts.seed}, is gone", None, "leave it in the graph"
        )
    straight = {now.kept[name] for name in program.facts.straight_through if name in now.kept}
    for name in sorted(program.facts.straight_through):
        if name not in now.kept and (image := now.image(name)) is not None and image not in straight:
            what = f"{image.name} replaces {name}, which hands gradients straight through"
            yield Broken(what, image.name, "leave it in the graph, or capture with backward=...")
    for number in sorted(program.calls.preserved):
        row = program.calls.rows[number]
        for name in (*(row.inputs.names if row.inputs else ()), *(row.outputs.names if row.outputs else ())):
            if now.image(name) is None:
                what = f"{name} is gone, which {row.site} takes or returns, and its calls are preserved"
                yield Broken(what, None, "leave it in the graph, or capture without preserve_calls")


def _lost_draws(old: WorkingCopy, now: After) -> Iterator[Broken]:
    """What happens less often: operations that draw or act are never equal, nor without effect."""
    before, after = _drawing(old.nodes.values()), _drawing(now.graph.nodes)
    if len(after) < len(before):
        gone = [node.name for node in before if now.image(node.name) not in after]
        what = (
            f"{len(before)} operations drew random numbers or gave nothing, and {len(after)} after the pass"
        )
        remedy = "let the pass leave operations alone that draw random numbers, or give nothing"
        yield Broken(f"{what}, without {', '.join(gone)}" if gone else what, None, remedy)


def _drawing(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if keeps_its_place(node.target, node.args, node.kwargs)]

"""What differs between two programs, by provenance: which calls do otherwise, and in what.

Operations have no identity across programs, but for the call and the phase they come from. Those of a call
are compared as a bag, by operator and by what they make: names and order do not count. Calls whose
differences are the same, and that differ in numbers in their paths alone, are told once.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from whence._torch.operators.schemas import op_name
from whence.program import Program
from whence.program.node_records import origin_of
from whence.program.queries.notebook import OpensInNotebook
from whence.program.signature import describe

Operation = tuple[str, str]
"""An operator, and what it makes: `("aten.mm.default", "f32[8, 4]")`."""
Bag = Mapping[tuple[str, str], Counter[Operation]]
"""The operations of each call site and phase."""


@dataclass(frozen=True)
class CallChange:
    """What one call, or several alike, do otherwise in one phase.

    `calls` are call sites; the empty one is the program itself. `added` and `removed` are operations with how
    often; `moved` are operations that another call has now, or had before.
    """

    calls: tuple[str, ...]
    phase: str
    added: tuple[tuple[Operation, int], ...]
    removed: tuple[tuple[Operation, int], ...]
    moved: tuple[tuple[Operation, int], ...] = ()

    def __str__(self) -> str:
        several = f" … {self.calls[-1]} (× {len(self.calls)})" if len(self.calls) > 1 else ""
        lines = [f"{self.calls[0] or '(program)'}{several}, {self.phase}"]
        for sign, rows in (("+", self.added), ("-", self.removed), ("~", self.moved)):
            lines += [f"  {sign} {name} {made}{f' × {n}' if n > 1 else ''}" for (name, made), n in rows]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Diff(OpensInNotebook):
    """The differences between two programs.

    `appeared` and `gone` are call sites that only the second and only the first has, `retyped` those of
    another class. `rows` are what calls do otherwise. `inputs` and `outputs` are rows of the signature that
    are there in one alone (`+ name: f32[4]`, `- …`). `ok` says that there is no difference.
    """

    appeared: tuple[str, ...]
    gone: tuple[str, ...]
    retyped: tuple[tuple[str, str, str], ...]
    rows: tuple[CallChange, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not any((self.appeared, self.gone, self.retyped, self.rows, self.inputs, self.outputs))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __repr__(self) -> str:
        calls = len(self.appeared) + len(self.gone) + len(self.retyped)
        return f"<Diff: {calls:,} calls came, went or changed class, {len(self.rows):,} do otherwise>"

    def __str__(self) -> str:
        if self.ok:
            return "the same calls, operations and signature"
        borders = (("input", self.inputs), ("output", self.outputs))
        lines = [f"+ call {site}" for site in self.appeared] + [f"- call {site}" for site in self.gone]
        lines += [f"~ call {site}: {before}, now {now}" for site, before, now in self.retyped]
        lines += [f"{text[0]} {kind}{text[1:]}" for kind, rows in borders for text in rows]
        return "\n".join([*lines, *map(str, self.rows)])


def diff_of(before: Program, after: Program) -> Diff:
    """From one program to another; neither runs."""
    sites = [{str(call.site): call.site.type for call in each.calls} for each in (before, after)]
    shared = [site for site in sites[0] if site in sites[1]]
    retyped = [(site, sites[0][site], sites[1][site]) for site in shared if sites[0][site] != sites[1][site]]
    bags = _bag(before), _bag(after)
    return Diff(
        appeared=tuple(site for site in sites[1] if site not in sites[0]),
        gone=tuple(site for site in sites[0] if site not in sites[1]),
        retyped=tuple(retyped),
        rows=tuple(_folded(list(_changes(*bags)))),
        inputs=tuple(_of_one(*(_inputs(each) for each in (before, after)))),
        outputs=tuple(_of_one(*(_outputs(each) for each in (before, after)))),
    )


def _bag(program: Program) -> dict[tuple[str, str], Counter[Operation]]:
    found: dict[tuple[str, str], Counter[Operation]] = {}
    for node in program.nodes():
        if node.op == "call_function":
            origin = origin_of(node)
            site = "" if origin.place is None else str(origin.place)
            made = (op_name(node.target), describe(node.meta.get("val")))
            found.setdefault((site, origin.phase.value), Counter())[made] += 1
    return found


def _changes(before: Bag, after: Bag) -> Iterator[CallChange]:
    more = {at: after.get(at, Counter()) - before.get(at, Counter()) for at in (*before, *after)}
    less = {at: before.get(at, Counter()) - after.get(at, Counter()) for at in (*before, *after)}
    moved = sum(more.values(), Counter[Operation]()) & sum(less.values(), Counter[Operation]())
    for at in more:
        both = (more[at] | less[at]) & moved
        added, removed = more[at] - both, less[at] - both
        if added or removed or both:
            rows = (tuple(sorted(bag.items())) for bag in (added, removed, both))
            yield CallChange((at[0],), at[1], *rows)


def _folded(changes: list[CallChange]) -> Iterator[CallChange]:
    """Changes that are alike as one, where the first of them stands."""
    groups: dict[Any, list[CallChange]] = {}
    for change in changes:
        key = (re.sub(r"\d+", "*", change.calls[0]), change.phase, change.added, change.removed, change.moved)
        groups.setdefault(key, []).append(change)
    for group in groups.values():
        first = group[0]
        calls = tuple(change.calls[0] for change in group)
        yield CallChange(calls, first.phase, first.added, first.removed, first.moved)


def _inputs(program: Program) -> list[str]:
    rows = (*program.signature.attributes, *program.signature.inputs)
    return [f"{row.path}: {describe(row.value)}" for row in rows]


def _outputs(program: Program) -> list[str]:
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [
        f"{row.kind.value} {row.path}: {describe(nodes[row.node] if row.node else row.value)}"
        for row in program.signature.outputs
    ]


def _of_one(before: list[str], after: list[str]) -> Iterator[str]:
    yield from (f"+ {row}" for row in after if row not in before)
    yield from (f"- {row}" for row in before if row not in after)

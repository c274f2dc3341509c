"""What differs between two programs, by provenance: which calls do otherwise, and in what.

Operations have no identity across programs, but for the call and the phase they come from. Those of a call
are compared as a bag, by operator and by what they make: names and order do not count, but where as many of
one line make something else, which are then the same operations, changed. Where that is alike their constants
are compared, and where all is alike what each of them reads. Calls whose differences are the same, and that
differ in numbers in their paths alone, are told once.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

from torch import fx

from whence._torch.graphs import nodes_in
from whence._torch.operators.schemas import op_name
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence.errors import UsageError
from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.program.plain import AsJSON
from whence.program.queries.notebook import OpensInNotebook
from whence.program.signature import describe
from whence.reports.cost import cost_of
from whence.reports.memory import memory_of
from whence.schema import Phase

T = TypeVar("T", bound=tuple[str, ...])
Operation = tuple[str, str]
"""An operator, and what it makes: `("aten.mm.default", "f32[8, 4]")`; of what, where else nothing differs."""
Retyped = tuple[str, str, str]
"""An operator, what it made, and what it makes now."""
Lines = Mapping[tuple[str, str | None], list[str]]
"""What the operations of a call and phase make, in order, by operator and line."""
Bag = Mapping[tuple[str, str], Counter[Operation]]
"""The operations of each call site and phase."""


@dataclass(frozen=True)
class CallChange:
    """What one call, or several alike, do otherwise in one phase.

    `calls` are call sites; the empty one is the program itself. `added` and `removed` are operations with how
    often; `moved` are operations that another call has now, or had before, and `came` those of them that this
    call has now. `changed` are operations, the same by line and order, that make something else.
    """

    calls: tuple[str, ...]
    phase: str
    added: tuple[tuple[Operation, int], ...]
    removed: tuple[tuple[Operation, int], ...]
    moved: tuple[tuple[Operation, int], ...] = ()
    came: tuple[tuple[Operation, int], ...] = ()
    changed: tuple[tuple[Retyped, int], ...] = ()

    def __str__(self) -> str:
        lines = [f"{_several(self.calls)}, {self.phase}"]
        lines += [f"  ~ {name} {was}, now {now}{_times(n)}" for (name, was, now), n in self.changed]
        for sign, rows in (("+", self.added), ("-", self.removed), ("~", self.moved)):
            for (name, made), n in rows:
                moved = "" if sign != "~" else self._moved_how((name, made), n)
                lines.append(f"  {sign} {name} {made}{_times(n)}{moved}")
        return "\n".join(lines)

    def _moved_how(self, operation: Operation, count: int) -> str:
        came = dict(self.came).get(operation, 0)
        return " (moved here)" if came == count else " (moved)" if came else " (moved away)"


@dataclass(frozen=True, repr=False)
class Diff(OpensInNotebook, AsJSON):
    """The differences between two programs.

    `appeared` and `gone` are call sites that only the second and only the first has, `retyped` those of
    another class. `rows` are what calls do otherwise. `inputs` and `outputs` are rows of the signature that
    are there in one alone (`+ name: f32[4]`, `- …`). `figures` are those of the whole programs, before and
    after, where they differ: FLOPs by phase, bytes. `ok` says that there is no difference.
    """

    appeared: tuple[str, ...]
    gone: tuple[str, ...]
    retyped: tuple[tuple[str, str, str], ...]
    rows: tuple[CallChange, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    figures: tuple[tuple[str, int, int], ...] = ()

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
        lines = [("+ call", site, "") for site in self.appeared] + [
            ("- call", site, "") for site in self.gone
        ]
        lines += [("~ call", site, f": {before}, now {now}") for site, before, now in self.retyped]
        lines += [*_border_lines("input", self.inputs), *_border_lines("output", self.outputs)]
        changed = [f"{name}: {was:,}, now {now:,}" for name, was, now in self.figures]
        return "\n".join([*_told_once(lines), *map(str, self.rows), *changed])


def _border_lines(kind: str, rows: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Rows of the signature: which, its path, and what it is; one change where both programs have it."""
    made: dict[tuple[str, str], dict[str, str]] = {}
    for text in rows:
        sign, _, row = text.partition(" ")
        which, _, rest = row.partition(" ") if kind == "output" else ("", "", row)
        path, _, what = rest.rpartition(": ")
        made.setdefault((f"{kind} {which}".rstrip(), path), {})[sign] = what
    for (which, path), told in made.items():
        sign = "~" if len(told) > 1 else next(iter(told))
        yield f"{sign} {which}", path, f": {', now '.join(told[each] for each in '-+' if each in told)}"


def _told_once(lines: list[tuple[str, str, str]]) -> Iterator[str]:
    """Lines that differ in numbers in a path alone as one, where the first of them stands."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for begins, path, ends in lines:
        groups.setdefault((begins, _without_numbers(path), ends), []).append(path)
    return (f"{begins} {_several(paths)}{ends}" for (begins, _, ends), paths in groups.items())


def _times(count: int) -> str:
    return f" × {count}" if count > 1 else ""


def _several(paths: Sequence[str]) -> str:
    return f"{paths[0] or '(program)'}" + (f" … {paths[-1]} (× {len(paths)})" if len(paths) > 1 else "")


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def diff_of(before: FlatProgram, after: FlatProgram) -> Diff:
    """From one program to another; neither runs."""
    sites = [{str(call.site): call.site.type for call in each.calls} for each in (before, after)]
    shared = [site for site in sites[0] if site in sites[1]]
    retyped = [(site, sites[0][site], sites[1][site]) for site in shared if sites[0][site] != sites[1][site]]
    return Diff(
        appeared=tuple(site for site in sites[1] if site not in sites[0]),
        gone=tuple(site for site in sites[0] if site not in sites[1]),
        retyped=tuple(retyped),
        rows=tuple(_folded(_rows_of_calls(before, after))),
        inputs=tuple(_of_one(*(_inputs_in_words(each) for each in (before, after)))),
        outputs=tuple(_of_one(*(_outputs_in_words(each) for each in (before, after)))),
        figures=tuple(_figure_rows(before, after)),
    )


def _figure_rows(before: FlatProgram, after: FlatProgram) -> Iterator[tuple[str, int, int]]:
    """None where data decide sizes: nobody said which."""
    try:
        was, now = _totals(before), _totals(after)
    except UsageError:
        return
    for name in was | now:
        if was.get(name, 0) != now.get(name, 0):
            yield name, was.get(name, 0), now.get(name, 0)


def _totals(program: FlatProgram) -> dict[str, int]:
    total, memory = cost_of(program).total, memory_of(program)
    flops = {f"{phase} FLOPs": count for phase, count in total.flops.items()}
    moved = {"parameters": total.parameters, "bytes moved": total.read + total.written}
    return {**flops, **moved, "kept bytes": memory.kept_bytes, "peak bytes": memory.peak}


def _rows_of_calls(before: FlatProgram, after: FlatProgram) -> list[CallChange]:
    """By what operations make; in calls where that is alike by constants; if all is, by what they read."""
    told = _Wording(before), _Wording(after)
    rows = list(_bag_changes(*(each.bag(each.made) for each in told), lines=[each.lines() for each in told]))
    known = {(call, row.phase) for row in rows for call in row.calls}
    constants = _bag_changes(*(each.bag(each.of_constants) for each in told))
    rows += [row for row in constants if (row.calls[0], row.phase) not in known]
    return rows or list(_bag_changes(*(each.wiring() for each in told)))


class _Wording:
    """What is said of the nodes of a program, of each once."""

    def __init__(self, program: FlatProgram) -> None:
        self._program = program
        self._operations = [node for node in program.nodes() if node.op == "call_function"]
        self._sites: dict[fx.Node, tuple[str, str]] = {}
        self._made: dict[fx.Node, str] = {}
        self._spelled: dict[int, str] = {}

    def bag(self, spelled: Callable[[fx.Node], str]) -> dict[tuple[str, str], Counter[Operation]]:
        """The operations of each call site and phase, in these words."""
        found: dict[tuple[str, str], Counter[Operation]] = {}
        for node in self._operations:
            found.setdefault(self._site(node), Counter())[op_name(node.target), spelled(node)] += 1
        return found

    def lines(self) -> dict[tuple[str, str], Lines]:
        """What the operations of each call site and phase make, in order, by operator and line."""
        found: dict[tuple[str, str], dict[tuple[str, str | None], list[str]]] = {}
        for node in self._operations:
            source = origin_of(node).source
            key = op_name(node.target), None if source is None else source.short
            found.setdefault(self._site(node), {}).setdefault(key, []).append(self.made(node))
        return dict(found)

    def wiring(self) -> Bag:
        """What each operation reads, and what is returned."""
        found = self.bag(self._of_reads)
        returned = found.setdefault(("", Phase.FORWARD.value), Counter())
        for row in self._program.signature.outputs:
            if row.node:
                node = self._program.node(row.node)
                returned[row.path, f"{self.made(node)} of {self._source(node)}"] += 1
        return found

    def made(self, node: fx.Node) -> str:
        """The type of its value."""
        if node not in self._made:
            self._made[node] = describe(node.meta.get("val"))
        return self._made[node]

    def of_constants(self, node: fx.Node) -> str:
        """That, and the arguments that are no values."""
        if not node.kwargs and all(type(value) is fx.Node for value in node.args):
            return self.made(node)
        given = sorted(_arguments_by_name(node), key=itemgetter(0))
        told = [f"{name}={_constant_text(leaf)}" for name, value in given for leaf in _constants_in(value)]
        return f"{self.made(node)} of {', '.join(told)}" if told else self.made(node)

    def _of_reads(self, node: fx.Node) -> str:
        read = nodes_in((node.args, dict(sorted(node.kwargs.items()))))
        return f"{self.made(node)} of {', '.join(map(self._source, read))}"

    def _source(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return node.name
        return " ".join((op_name(node.target), *filter(None, self._site(node))))

    def _site(self, node: fx.Node) -> tuple[str, str]:
        if node not in self._sites:
            origin = origin_of(node)
            call = origin.made_in
            told = "" if call is None else self._spelled.get(id(call))
            if told is None:
                told = self._spelled[id(call)] = str(call)
            self._sites[node] = told, origin.phase.value
        return self._sites[node]


def _constants_in(value: Any) -> list[Any]:
    """What is in an argument besides nodes."""
    leaves = tree_flatten(value)[0] if isinstance(value, (list, tuple, dict)) else [value]
    return [leaf for leaf in leaves if not isinstance(leaf, fx.Node)]


def _arguments_by_name(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Arguments by name, or by number where there is no schema, without those that are as by default."""
    names, defaults = _declared(node.target)
    numbers = map(str, range(len(node.args)))
    for name, value in (*zip(names or numbers, node.args, strict=False), *node.kwargs.items()):
        if isinstance(value, fx.Node) or defaults.get(name) != str(value):
            yield name, value


@cache
def _declared(target: Any) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The names of arguments in the schema of an operator, and the texts of their defaults."""
    declared = getattr(getattr(target, "_schema", None), "arguments", ())
    defaults = {each.name: str(each.default_value) for each in declared if each.has_default_value()}
    return tuple(each.name for each in declared), defaults


def _constant_text(value: Any) -> str:
    """Its text, where that has no address in it."""
    return str(value) if type(value) in PLAIN else type(value).__name__


def _bag_changes(
    before: Bag, after: Bag, *, lines: Sequence[Mapping[tuple[str, str], Lines]] = ({}, {})
) -> Iterator[CallChange]:
    changed = [at for at in {**before, **after} if before.get(at) != after.get(at)]
    more = {at: after.get(at, Counter()) - before.get(at, Counter()) for at in changed}
    less = {at: before.get(at, Counter()) - after.get(at, Counter()) for at in changed}
    retyped = {at: _retyped(less[at], more[at], *(each.get(at, {}) for each in lines)) for at in changed}
    moved = sum(more.values(), Counter[Operation]()) & sum(less.values(), Counter[Operation]())
    to_come, to_go = Counter(moved), Counter(moved)  # as many as went somewhere came from somewhere
    for at in more:
        came, went = more[at] & to_come, less[at] & to_go
        to_come, to_go = to_come - came, to_go - went
        bags = (more[at] - came, less[at] - went, came + went, came)
        if any(bags) or retyped[at]:
            added, removed, exchanged, arrived = map(_counted, bags)
            yield CallChange((at[0],), at[1], added, removed, exchanged, arrived, _counted(retyped[at]))


def _counted(bag: Counter[T]) -> tuple[tuple[T, int], ...]:
    return tuple(sorted(bag.items()))


def _retyped(
    less: Counter[Operation], more: Counter[Operation], before: Lines, after: Lines
) -> Counter[Retyped]:
    """What makes something else at its place among as many of one line; taken out of what went and came."""
    found = Counter[Retyped]()
    for (name, line), was in before.items():
        now = after.get((name, line), [])
        for pair in zip(was, now, strict=True) if len(was) == len(now) else ():
            gone, came = ((name, made) for made in pair)
            if gone != came and less[gone] > 0 and more[came] > 0:
                less[gone] -= 1
                more[came] -= 1
                found[name, *pair] += 1
    return found


def _folded(changes: list[CallChange]) -> Iterator[CallChange]:
    """Changes that are alike as one, where the first of them stands."""
    groups: dict[Any, list[CallChange]] = {}
    for change in changes:
        key = _without_numbers(change.calls[0]), replace(change, calls=())
        groups.setdefault(key, []).append(change)
    for group in groups.values():
        yield replace(group[0], calls=tuple(change.calls[0] for change in group))


def _inputs_in_words(program: FlatProgram) -> list[str]:
    rows = (*program.signature.attributes, *program.signature.inputs)
    return [f"{row.path}: {describe(row.value)}" for row in rows]


def _outputs_in_words(program: FlatProgram) -> list[str]:
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [
        f"{row.kind.value} {row.path}: {describe(nodes[row.node] if row.node else row.value)}"
        for row in program.signature.outputs
    ]


def _of_one(before: list[str], after: list[str]) -> Iterator[str]:
    yield from (f"+ {row}" for row in after if row not in before)
    yield from (f"- {row}" for row in before if row not in after)

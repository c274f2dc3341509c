"""Put in the place of every stand-in what it stands for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import is_not
from typing import Any

from torch import fx

from whence._torch.autograd.nodes import gradient_key
from whence._torch.graphs import Inserter, NameCounts
from whence._torch.sizes.nodes import bases_of
from whence.program import Adjoint
from whence.program.arguments.convention import repeated_positions
from whence.program.calls import Leaf, Named
from whence.program.node_records import has_origin
from whence.program.replay import Copies
from whence.provenance.places import PROGRAM
from whence.rewriting.functionalize import Functional
from whence.schema import Phase
from whence.tracing.attribution.gradient_edges import GradientSums
from whence.tracing.log.events import Gave, MadeContiguous, TensorAsked, Took
from whence.tracing.log.log import Log
from whence.tracing.objections import Doubt
from whence.tracing.replay.records.links import Link, Links, adjoints_of, links_of, settled
from whence.tracing.replay.records.recipes import Recipe, RecipeRun, RecipeWriter, Section, Written
from whence.tracing.replay.records.records import Records
from whence.tracing.replay.records.template import Application, Differentiated, Rehearsal, Template

Slot = tuple[int, int]
"""Which input a gradient is for, and the how manieth it is."""


@dataclass(frozen=True)
class Exchanged:
    """The values that modules exchanged and that carry gradients, the adjoints of those by name, and which
    calls were written from one record."""

    values: tuple[fx.Node, ...]
    adjoints: Mapping[str, Adjoint]
    copies: Copies


def expand(records: Records, log: Log, functional: Functional, gradients: GradientSums) -> Exchanged:
    """Replace all stand-ins; raises `Doubt` where a record cannot be used after all."""
    links, values, copies = links_of(log.keys, gradients), list(log.keys), Copies({}, {})
    if records.applications:
        expansion = _Expansion(records, log, functional, gradients, links)
        expansion.run()
        links, values = settled(links, expansion.instead), [*values, *expansion.exchanged]
        copies = expansion.copies()
    records.markers.remove(functional.graph)
    return Exchanged(tuple(values), adjoints_of(links), copies)


class _Expansion:
    """Replaces the stand-ins of one graph.

    `instead` collects the links that replace those to stand-ins, `exchanged` the values that modules exchange
    inside the calls that are written.
    """

    def __init__(
        self, records: Records, log: Log, functional: Functional, gradients: GradientSums, links: Links
    ) -> None:
        self.instead: dict[fx.Node, tuple[range, list[Link]]] = {}
        self.exchanged: list[fx.Node] = []
        self._records, self._log, self._functional = records, log, functional
        self._gradients, self._links = gradients, links
        left_out = {name for application in records.applications for name in application.all_left_out}
        self._inserter = Inserter(functional.graph, left_out)
        self._sizes = bases_of(functional.sizes)
        self._markers = frozenset(records.markers.nodes)
        self._rehearsals = list(records.rehearsals())
        self._skipped = {rehearsal.begin: rehearsal.border for rehearsal in self._rehearsals}
        self._written: dict[Application, Written] = {}
        self._items: dict[tuple[Application, int], fx.Node] = {}
        self._recipes: dict[fx.Node, list[Recipe]] = {}
        self._inside: dict[Template, list[fx.Node]] = {}
        self._told: dict[Template, frozenset[str]] = {}
        self._made_inside: dict[Template, list[fx.Node]] = {}
        self._by_name = {n.name: n for n, mark in log.marks.items() if mark.phase is Phase.FORWARD}
        numbers = {scope.site: number for number, scope in enumerate(log.scopes)}
        self._writer = RecipeWriter(numbers, self._by_name, functional)
        self._tables = {
            rehearsal: links_of(template.keys, rehearsal.gradients)
            for template in records.templates
            for rehearsal in template.rehearsals.values()
        }

    def run(self) -> None:
        """Replace the stand-ins in the order of the graph, so that what is copied is complete."""
        owners = {node: rehearsal for rehearsal in self._rehearsals for node in rehearsal.log.order}
        applications = self._records.applications
        forwards = {application.node: application for application in applications}
        backwards = {each.node: (a, each) for a in applications for each in a.backwards}
        for node in list(self._functional.graph.nodes):
            if node in forwards:
                self._write_forward(forwards[node])
            elif node in backwards:
                owner = owners.get(node)
                table = self._links if owner is None else self._tables[owner]
                arrived = self._gradients if owner is None else owner.gradients
                self._write_backward(*backwards[node], table, arrived)
        for rehearsal in self._rehearsals:
            self._remove(rehearsal)

    def copies(self) -> Copies:
        """Which calls were written from one record, with the same pattern of what they take and give back."""
        records = {
            application.scopes.start: (
                id(application.template),
                repeated_positions(application.given),
                tuple((id(each.rehearsal), each.returned, each.whole) for each in application.backwards),
            )
            for application in self._written
        }
        positions: dict[fx.Node, int] = {}
        for application, written in self._written.items():
            given = {*application.given, *self._sizes}
            positions |= {made: at for at, made in enumerate(written.values()) if made not in given}
        return Copies(records, positions)

    def _remove(self, rehearsal: Rehearsal) -> None:
        """Take what was only rehearsed out of the graph."""
        node = rehearsal.border.prev
        rehearsal.border.args = ()
        while node is not rehearsal.begin:
            node, gone = node.prev, node
            if gone not in self._markers:
                self._functional.graph.erase_node(gone)

    def _replace(self, item: fx.Node, made: fx.Node, now: fx.Node) -> None:
        """Let `made` stand for what an item was, and `now`, which may have been written since, be read."""
        functional = self._functional
        item.replace_all_uses_with(now)
        functional.same[item] = functional.replaced[item] = made
        if now is not made:
            functional.latest[made] = now
        functional.graph.erase_node(item)

    def _recipes_of(self, section: Section, begin: fx.Node, border: fx.Node) -> list[Recipe]:
        if begin not in self._recipes:
            nodes = self._between(begin, border, section.template.kind)
            self._recipes[begin] = self._writer.recipes(nodes, section)
        return self._recipes[begin]

    def _between(self, begin: fx.Node, border: fx.Node, kind: type) -> Iterator[fx.Node]:
        """The operations between two markers, without those of rehearsals."""
        node = begin.next
        while node is not border:
            if node in self._skipped:
                node = self._skipped[node]
            elif node.op == "call_function" and node not in self._markers:
                if self._functional.sources.get(node) is border:
                    raise Doubt(kind, "it returns a view of something that it writes afterwards")
                if not has_origin(node):
                    raise Doubt(kind, f"its backward computes {node.name} outside autograd's nodes")
                yield node
            node = node.next

    # --- forward -------------------------------------------------------------------------------------

    def _write_forward(self, application: Application) -> None:
        template, stand_in = application.template, application.node
        crossing, given = _read_by(template.border), _read_by(stand_in)
        inputs, outputs = crossing[: len(given)], crossing[len(given) :]
        written = {size: size for size in self._sizes} | dict(zip(inputs, given, strict=True))
        for (node, _), value in zip(template.inside.inputs, given, strict=True):
            written.setdefault(node, value)
        start = template.start
        section = Section(template, start.names, start.called, template.functions, {})
        scopes, starts = self._log.scopes, application.starts
        run = RecipeRun(application, stand_in, scopes, starts, application.called, {}, written)
        run.write(self._recipes_of(section, start.begin, template.border), self._inserter)
        for item in list(stand_in.users):
            position = _position(item)
            self._items[application, position] = item
            made = self._functional.value_of(template.inside.outputs[position][0])
            now = written[outputs[position]]
            self._replace(item, written.get(made, now), now)
        self._functional.graph.erase_node(stand_in)
        self._written[application] = written
        self._note(application, written)

    def _note(self, application: Application, written: Written) -> None:
        """What the log says of the recorded call, for the values that were written."""
        template, value_of = application.template, self._functional.value_of
        self._fill_scopes(application, written)
        self._note_writes(template, [*template.recorded, *self._made_inside.get(template, ())], written)
        for asked in self._log.asked[template.asked]:
            if (value := written.get(value_of(asked.node))) is not None:
                self._log.add(TensorAsked(value, asked.fact))
        for node in filter(None, self._log.contiguous[template.contiguous]):
            if (value := written.get(value_of(node))) is not None:
                self._log.add(MadeContiguous(value))
        recorded = [*map(value_of, template.keys), *self._inside.get(template, ())]
        exchanged = [written[node] for node in recorded if node in written]
        self.exchanged += exchanged
        for around in self._records.templates:
            if application.node in around.nodes:
                self._inside.setdefault(around, []).extend(exchanged)
                self._made_inside.setdefault(around, []).extend(written.values())
                self._by_name.update((made.name, made) for made in written.values())

    def _fill_scopes(self, application: Application, written: Written) -> None:
        template, log = application.template, self._log
        wanted = self._names_told(template)
        names = self._names_in(template, written, wanted)
        pairs = zip(template.inside.inputs, application.given, strict=True)
        names |= {node.name: Named(given.name) for (node, _), given in pairs if node.name in wanted}
        for like, number in zip(template.scopes[1:], application.scopes[1:], strict=True):
            if (inputs := log.taken.get(like)) is not None:
                log.add(Took(number, inputs.renamed(names)))
            if (outputs := log.given.get(like)) is not None:
                log.add(Gave(number, outputs.renamed(names)))

    def _names_told(self, template: Template) -> frozenset[str]:
        """The names of what calls inside a recorded one took and gave."""
        if template not in self._told:
            tables, inner = (self._log.taken, self._log.given), template.scopes[1:]
            held = [table[like] for like in inner for table in tables if like in table]
            self._told[template] = frozenset(name for structure in held for name in structure.names)
        return self._told[template]

    def _names_in(self, template: Template, written: Written, wanted: Set[str]) -> dict[str, Leaf]:
        """The names of what was written, by those wanted of what was recorded."""
        names: dict[str, Leaf] = {
            node.name: Named(made.name) for node, made in written.items() if node.name in wanted
        }
        for node in template.recorded if self._functional.replaced else ():
            value = self._functional.value_of(node)
            if value is not node and value in written:
                names[node.name] = Named(written[value].name)
        return names

    def _note_writes(self, template: Template, nodes: Iterable[fx.Node], written: Written) -> None:
        """The successive values of what is written in place inside the call."""
        histories = self._functional.history
        for base in nodes if histories else ():
            if base in histories and base in written:
                if not written.keys() >= set(histories[base]):
                    raise Doubt(template.kind, "what it gives is written afterwards")
                histories[written[base]] = [written[value] for value in histories[base]]

    # --- backward ------------------------------------------------------------------------------------

    def _write_backward(
        self, application: Application, backward: Differentiated, table: Links, gradients: GradientSums
    ) -> None:
        template, rehearsal, stand_in = application.template, backward.rehearsal, backward.node
        if any(map(is_not, map(self._functional.value_of, rehearsal.read), _read_by(rehearsal.border))):
            raise Doubt(template.kind, "its backward writes to a gradient that it has handed on")
        written = self._written[application]
        defined = [tangent for tangent in rehearsal.tangents if tangent is not None]
        written.update(zip(defined, _read_by(stand_in), strict=True))
        items = {backward.returned[_position(item)]: item for item in stand_in.users}
        section = Section(template, NameCounts({}), {}, {}, self._roots(template, rehearsal))
        recipes = self._recipes_of(section, rehearsal.begin, rehearsal.border)
        moved, left_out = self._sums_outside(backward, items, gradients, {recipe.node for recipe in recipes})
        outside = _scopes_outside(application, gradients)
        run = RecipeRun(application, stand_in, self._log.scopes, backward.starts, {}, outside, written)
        self._follow(recipes, run, moved, left_out)
        self._note_writes(template, (recipe.node for recipe in self._recipes[rehearsal.begin]), written)
        self._link(application, backward, items, table, gradients)
        for slot, item in items.items():
            value = written[_held_in(rehearsal, slot, whole=slot[0] in backward.whole)]
            self._replace(item, value, value)
        self._functional.graph.erase_node(stand_in)

    def _follow(
        self,
        recipes: Sequence[Recipe],
        run: RecipeRun,
        moved: Mapping[fx.Node | None, Sequence[fx.Node]],
        left_out: Set[fx.Node],
    ) -> None:
        """Write a backward, with the sums `moved` each before its node, or at the end."""
        if not moved and not left_out:
            run.write(recipes, self._inserter)
            return
        copied = set[fx.Node | None]()
        for recipe in recipes:
            copied.add(recipe.node)
            for total in moved.get(recipe.node, ()):
                run.before.prepend(total)
            run.write(() if recipe.node in left_out else (recipe,), self._inserter)
        for total in (total for node, totals in moved.items() if node not in copied for total in totals):
            run.before.prepend(total)

    def _sums_outside(
        self,
        backward: Differentiated,
        items: Mapping[Slot, fx.Node],
        gradients: GradientSums,
        copied: set[fx.Node],
    ) -> tuple[dict[fx.Node | None, list[fx.Node]], set[fx.Node]]:
        """Sums with gradients from elsewhere, by the rehearsed node each comes before; and the sums they
        replace.

        Only what is copied can come after one: stand-ins that were rehearsed are gone by now.
        """
        rehearsal, order = backward.rehearsal, backward.rehearsal.log.order
        sums = gradients.sum_of
        moved: dict[fx.Node | None, list[fx.Node]] = {}
        left_out: set[fx.Node] = set()
        parts = [(rehearsal.arrivals[i][n], (i, n)) for i, n in backward.returned if i not in backward.whole]
        for arriving, (position, number) in sorted(parts, key=lambda part: part[0].turn):
            own = None if arriving.sum is None else _read_by(rehearsal.border)[arriving.sum]
            left_out |= set() if own is None else {own}
            before = own or next((node for node in order[arriving.at :] if node in copied), None)
            total = sums.get(items[position, number])
            if total is not None:
                moved.setdefault(before, []).append(self._functional.value_of(total))
        return moved, left_out

    def _roots(self, template: Template, rehearsal: Rehearsal) -> dict[fx.Node, int]:
        """The sums that the gradient of an output itself is part of, by the position of the output."""
        tensors = ((i, template.inside.outputs[i][1]) for i in template.differentiable_outputs)
        positions = {gradient_key(tensor): position for position, tensor in tensors}
        return {
            self._functional.value_of(node): positions[total.key]
            for node, total in rehearsal.gradients.sums.items()
            if total.key in positions and total.contributors[0] == PROGRAM
        }

    def _link(
        self,
        application: Application,
        backward: Differentiated,
        items: Mapping[Slot, fx.Node],
        table: Links,
        gradients: GradientSums,
    ) -> None:
        """Say which gradients reached the values inside the call, and those it took and gave."""
        template, rehearsal = application.template, backward.rehearsal
        offset = application.scopes.start - template.scopes.start
        written = _Renewed(self._written[application], self._functional)
        value_of = self._functional.value_of
        outputs = {value_of(node): position for position, (node, _) in enumerate(template.inside.outputs)}
        for value, links in settled(self._tables[rehearsal], self.instead).items():
            position = outputs.get(value_of(value))
            given = () if position is None else rehearsal.tangents
            inner = [link.moved(written, offset) for link in links if link.scope or link.node not in given]
            if position is not None:
                inner = [*_links_outside(application, position, gradients), *inner]
                table.pop(self._items[application, position], None)
            table[written[value]] = inner
        for slot, item in items.items():
            whole = slot[0] in backward.whole
            links = [link.moved(written, offset) for link in _links_in(rehearsal, slot, whole=whole)]
            self.instead[item] = (application.scopes, links)


def _links_outside(application: Application, position: int, gradients: GradientSums) -> list[Link]:
    """The gradients that reached an output from outside."""
    key = application.output_keys.get(position)
    arrived = gradients.arrivals.get(key, ()) if key is not None else ()
    return [Link(arrival.node, arrival.scopes[0], arrival.sum) for arrival in arrived]


def _scopes_outside(application: Application, gradients: GradientSums) -> dict[int, tuple[int, ...]]:
    """For each output, the calls that its gradients came from."""
    arrived = {position: gradients.arrivals.get(key, ()) for position, key in application.output_keys.items()}
    return {
        position: tuple(scope for arrival in arrivals for scope in arrival.scopes)
        for position, arrivals in arrived.items()
    }


def _links_in(rehearsal: Rehearsal, slot: Slot, *, whole: bool) -> list[Link]:
    """The gradients that the backward returned in a slot, as they were rehearsed."""
    position, number = slot
    read = _read_by(rehearsal.border)
    arrivals = rehearsal.arrivals[position] if whole else (rehearsal.arrivals[position][number],)
    return [
        Link(read[a.value], a.scopes[0], read[a.sum] if whole and a.sum is not None else None)
        for a in arrivals
    ]


def _held_in(rehearsal: Rehearsal, slot: Slot, *, whole: bool) -> fx.Node:
    """The node of a rehearsal that holds what the backward returned in a slot."""
    last = _links_in(rehearsal, slot, whole=whole)[-1]
    return last.sum or last.node


def _read_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a marker or a stand-in reads, in order."""
    values: Any = node.args
    return tuple(values)


def _position(item: fx.Node) -> int:
    """Which result of a stand-in a node is."""
    position: Any = item.args[1]
    return int(position)


class _Renewed(dict[fx.Node, fx.Node]):
    """Nodes that are written again, found also by the nodes that were recorded, before they were
    rewritten."""

    def __init__(self, written: Mapping[fx.Node, fx.Node], functional: Functional) -> None:
        super().__init__(written)
        self._functional = functional

    def __missing__(self, node: fx.Node) -> fx.Node:
        value = self._functional.value_of(node)
        if value is node:
            raise KeyError(node)
        return self[value]

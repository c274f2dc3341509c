"""Put in the place of every stand-in what it stands for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from whence._torch.autograd import gradient_key
from whence._torch.graphs import Inserter, NameCounts, base_and_number
from whence.program import Adjoint, Contribution
from whence.program.calls import Leaf, Named
from whence.program.origins import ORIGIN, has_origin, origin_of
from whence.provenance import CallSite, Origin
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.following import Gradients
from whence.tracing.functional import Functional
from whence.tracing.notes import Notes, Scope
from whence.tracing.replay.replayer import Replayer
from whence.tracing.replay.template import Application, Counts, Differentiated, Doubt, Rehearsal, Template

Links = dict[fx.Node, list["Link"]]
"""For each value, the gradients that reached it."""


@dataclass(frozen=True, slots=True)
class Link:
    """One gradient that reached a value: its node, the call it came from, the sum it became a part of."""

    node: fx.Node
    scope: int
    sum: fx.Node | None

    def moved(self, env: Mapping[fx.Node, fx.Node], offset: int) -> "Link":
        """The same in a call that is replayed."""
        return Link(env[self.node], self.scope + offset, None if self.sum is None else env[self.sum])


@dataclass(frozen=True)
class Exchanged:
    """The values that modules exchanged and that carry gradients, and the adjoints of those by name."""

    values: tuple[fx.Node, ...]
    adjoints: Mapping[str, Adjoint]


def expand(replayer: Replayer, notes: Notes, functional: Functional, gradients: Gradients) -> Exchanged:
    """Replace all stand-ins; raises `Doubt` where a record cannot be used after all."""
    links = _links(notes.keys, gradients)
    values = list(notes.keys)
    if replayer.applications:
        expansion = _Expansion(replayer, notes, functional, gradients, links)
        expansion.run()
        links, values = expansion.links, [*values, *expansion.exchanged]
    for marker in reversed(replayer.markers):
        functional.graph.erase_node(marker)
    return Exchanged(tuple(values), _adjoints(links))


def _adjoints(links: Links) -> dict[str, Adjoint]:
    return {
        node.name: Adjoint(tuple(Contribution(x.node.name, x.scope, x.sum and x.sum.name) for x in arrived))
        for node, arrived in links.items()
    }


def _links(keys: Mapping[fx.Node, Any], gradients: Gradients) -> Links:
    return {
        node: [Link(arrival.node, arrival.scopes[0], arrival.sum) for arrival in gradients.arrivals[key]]
        for node, key in keys.items()
        if key in gradients.arrivals
    }


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to write a node of a template once more.

    `base` and `number` make its name, `function` the torch function it came from and which call of it. The
    calls of its origin are numbers, counted from that of the template; `root` is the position of the output
    whose own gradient is part of a sum.
    """

    node: fx.Node
    base: str
    number: int
    function: tuple[Any, str, int, str] | None
    calls: tuple[int, ...]
    place: int | None
    forward: fx.Node | None
    origin: Origin
    root: int | None = None


class _Expansion:
    """Replaces the stand-ins of one graph."""

    def __init__(
        self, replayer: Replayer, notes: Notes, functional: Functional, gradients: Gradients, links: Links
    ) -> None:
        self.replayer, self.notes, self.functional = replayer, notes, functional
        self.gradients, self.links = gradients, links
        self.inserter = Inserter(functional.graph, replayer.left_out)
        self.markers = frozenset(replayer.markers)
        self.numbers = {scope.site: number for number, scope in enumerate(notes.scopes)}
        self.by_name = {
            node.name: node for node, mark in notes.marks.items() if mark.phase is Phase.FORWARD
        }
        self.rehearsals = [each for t in replayer.templates for each in t.rehearsals.values()]
        self.skipped = {rehearsal.begin: rehearsal.border for rehearsal in self.rehearsals}
        self.environments: dict[Application, dict[fx.Node, fx.Node]] = {}
        self.recipes: dict[fx.Node, list[Recipe]] = {}
        self.exchanged: list[fx.Node] = []
        self.items: dict[tuple[Application, int], fx.Node] = {}
        self.instead: dict[fx.Node, tuple[range, list[Link]]] = {}
        self.tables = {
            rehearsal: _links(template.keys, rehearsal.gradients)
            for template in replayer.templates
            for rehearsal in template.rehearsals.values()
        }

    def run(self) -> None:
        """Replace the stand-ins in the order of the graph, so that what is copied is complete."""
        owners = {node: rehearsal for rehearsal in self.rehearsals for node in rehearsal.notes.order}
        forwards = {a.node: a for a in self.replayer.applications}
        backwards = {a.backward.node: a for a in self.replayer.applications if a.backward is not None}
        for node in list(self.functional.graph.nodes):
            if node in forwards:
                self._forward(forwards[node])
            elif node in backwards:
                owner = owners.get(node)
                table = self.links if owner is None else self.tables[owner]
                self._backward(backwards[node], table, self.gradients if owner is None else owner.gradients)
        for rehearsal in self.rehearsals:
            self._remove(rehearsal)
        self.links = self._settled(self.links)

    def _remove(self, rehearsal: Rehearsal) -> None:
        """Take what was only rehearsed out of the graph."""
        node = rehearsal.border.prev
        rehearsal.border.args = ()
        while node is not rehearsal.begin:
            node, gone = node.prev, node
            if gone not in self.markers:
                self.functional.graph.erase_node(gone)

    # --- forward -------------------------------------------------------------------------------------

    def _forward(self, application: Application) -> None:
        template, stand_in = application.template, _node(application)
        values = template.border.args
        inputs = values[: len(template.inside.inputs)]
        env = dict(zip(inputs, stand_in.args, strict=True))
        for (node, _), given in zip(template.inside.inputs, stand_in.args, strict=True):
            env.setdefault(node, given)
        section = _Section(template.begin, template.border, template.starts, template.called, template.functions)
        run = _Run(application, self.notes.scopes, application.starts, application.called, {})
        for recipe in self._recipes(section, template, {}):
            self._write(recipe, stand_in, env, run)
        for item in list(stand_in.users):
            self.items[application, item.args[1]] = item
            self._replace(item, env[values[len(inputs) + item.args[1]]])
        self.functional.graph.erase_node(stand_in)
        self.environments[application] = env
        self._fill_scopes(application, env)
        self._note_layouts(application, env)
        self._note_writes(template, env)
        values = (env.get(self.functional.value_of(node)) for node in template.keys)
        self.exchanged += [value for value in values if value is not None]

    def _replace(self, item: fx.Node, value: fx.Node) -> None:
        item.replace_all_uses_with(value)
        self.functional.same[item] = value
        self.functional.replaced[item] = value
        self.functional.graph.erase_node(item)

    def _fill_scopes(self, application: Application, env: Mapping[fx.Node, fx.Node]) -> None:
        template, scopes = application.template, self.notes.scopes
        names = self._names_in(template, env)
        for like, number in zip(template.scopes[1:], application.scopes[1:], strict=True):
            inputs, outputs = scopes[like].inputs, scopes[like].outputs
            scopes[number].inputs = None if inputs is None else inputs.renamed(names)
            scopes[number].outputs = None if outputs is None else outputs.renamed(names)

    def _names_in(self, template: Template, env: Mapping[fx.Node, fx.Node]) -> dict[str, Leaf]:
        names: dict[str, Leaf] = {node.name: Named(made.name) for node, made in env.items()}
        given = zip(template.inside.inputs, template.border.args, strict=False)
        names |= {node.name: Named(env[value].name) for (node, _), value in given}
        for node in template.recorded:
            value = self.functional.value_of(node)
            if value is not node and value in env:
                names[node.name] = Named(env[value].name)
        return names

    def _note_writes(self, template: Template, env: Mapping[fx.Node, fx.Node]) -> None:
        """The successive values of what is written inside the call."""
        histories = self.functional.history
        for base in template.recorded if histories else ():
            if base in histories and base in env:
                histories[env[base]] = [env[value] for value in histories[base]]

    def _note_layouts(self, application: Application, env: Mapping[fx.Node, fx.Node]) -> None:
        nodes = [self.notes.layouts_read[i] for i in application.template.layouts]
        found = (env.get(self.functional.value_of(node)) for node in nodes)
        self.notes.layouts_read += [node for node in found if node is not None]

    # --- backward ------------------------------------------------------------------------------------

    def _backward(self, application: Application, table: Links, gradients: Gradients) -> None:
        backward = application.backward
        if backward is None:
            return
        rehearsal, stand_in = backward.rehearsal, backward.node
        env = self.environments[application]
        defined = [tangent for tangent in rehearsal.tangents if tangent is not None]
        env.update(zip(defined, stand_in.args, strict=True))
        sums = {arrival.node: arrival.sum for held in gradients.arrivals.values() for arrival in held}
        items = {backward.returned[item.args[1]]: item for item in stand_in.users}  # type: ignore[index]
        moved, left_out = self._sums_outside(application, backward, items, sums)
        section = _Section(rehearsal.begin, rehearsal.border, NameCounts({}), {}, {})
        outside = self._arrived_outside(application, gradients)
        run = _Run(application, self.notes.scopes, backward.starts, {}, outside)
        for recipe in self._recipes(section, application.template, self._roots(application.template, rehearsal)):
            for total in moved.pop(recipe.node, ()):
                stand_in.prepend(total)
            if recipe.node not in left_out:
                self._write(recipe, stand_in, env, run)
        for total in (total for totals in moved.values() for total in totals):
            stand_in.prepend(total)
        self._link(application, backward, env, items, table, gradients)
        for slot, item in items.items():
            self._replace(item, env[self._held(rehearsal, slot, whole=slot[0] in backward.whole)])
        self.functional.graph.erase_node(stand_in)

    def _held(self, rehearsal: Rehearsal, slot: tuple[int, int], *, whole: bool) -> fx.Node:
        """The node of a rehearsal that holds what the backward returned in a slot."""
        position, number = slot
        arriving = rehearsal.arrivals[position][-1 if whole else number]
        at = arriving.sum if whole and arriving.sum is not None else arriving.value
        held: Any = rehearsal.border.args[at]
        return held  # type: ignore[no-any-return]

    def _sums_outside(
        self,
        application: Application,
        backward: Differentiated,
        items: Mapping[tuple[int, int], fx.Node],
        sums: Mapping[fx.Node, fx.Node | None],
    ) -> tuple[dict[fx.Node | None, list[fx.Node]], set[fx.Node]]:
        """Sums with gradients from elsewhere, by the rehearsed node each comes before; and those they replace."""
        rehearsal = backward.rehearsal
        moved: dict[fx.Node | None, list[fx.Node]] = {}
        left_out: set[fx.Node] = set()
        for position, arrivals in rehearsal.arrivals.items():
            if position in backward.whole:
                continue
            for number, arriving in enumerate(arrivals):
                own: Any = None if arriving.sum is None else rehearsal.border.args[arriving.sum]
                order = rehearsal.notes.order
                before = own or (order[arriving.at] if arriving.at < len(order) else None)
                left_out |= set() if own is None else {own}
                total = sums.get(items[position, number])
                if total is not None:
                    moved.setdefault(before, []).append(self.functional.value_of(total))
        return moved, left_out

    def _roots(self, template: Template, rehearsal: Rehearsal) -> dict[fx.Node, int]:
        """The sums that the gradient of an output itself is part of, by the position of the output."""
        keys = {
            gradient_key(template.inside.outputs[position][1]): position
            for position in template.differentiable_outputs
        }
        return {
            self.functional.value_of(node): keys[total.key]
            for node, total in rehearsal.gradients.sums.items()
            if total.key in keys and total.contributors[0] == PROGRAM
        }

    def _arrived_outside(self, application: Application, gradients: Gradients) -> dict[int, tuple[int, ...]]:
        """For each output, the calls that its gradients came from."""
        found = {}
        for position, key in application.output_keys.items():
            held = gradients.arrivals.get(key, ())
            found[position] = tuple(scope for arrival in held for scope in arrival.scopes)
        return found

    def _link(
        self,
        application: Application,
        backward: Differentiated,
        env: Mapping[fx.Node, fx.Node],
        items: Mapping[tuple[int, int], fx.Node],
        table: Links,
        gradients: Gradients,
    ) -> None:
        """Say which gradients reached the values inside the call, and those it took and gave."""
        template, rehearsal = application.template, backward.rehearsal
        offset = application.scopes.start - template.scopes.start
        env = _Renewed(env, self.functional)
        outputs = {
            self.functional.value_of(node): position for position, (node, _) in enumerate(template.inside.outputs)
        }
        for value, arrived in self._settled(self.tables[rehearsal]).items():
            position = outputs.get(self.functional.value_of(value))
            given = rehearsal.tangents if position is not None else ()
            inner = [link.moved(env, offset) for link in arrived if link.scope or link.node not in given]
            if position is not None:
                key = application.output_keys.get(position)
                outer = [Link(a.node, a.scopes[0], a.sum) for a in gradients.arrivals.get(key, ())] if key else []
                inner = [*outer, *inner]
                table.pop(self.items[application, position], None)
            table[env[value]] = inner
        for slot, item in items.items():
            whole = slot[0] in backward.whole
            self.instead[item] = (
                application.scopes,
                self._links_of(rehearsal, slot, env, offset, whole=whole),
            )

    def _settled(self, table: Links) -> Links:
        """A table without links to stand-ins."""
        return {
            value: [new for link in arrived for new in _instead(link, self.instead)]
            for value, arrived in table.items()
        }

    def _links_of(
        self,
        rehearsal: Rehearsal,
        slot: tuple[int, int],
        env: Mapping[fx.Node, fx.Node],
        offset: int,
        *,
        whole: bool,
    ) -> list[Link]:
        position, number = slot
        read: Any = rehearsal.border.args
        arrivals = rehearsal.arrivals[position] if whole else (rehearsal.arrivals[position][number],)
        return [
            Link(env[read[a.value]], a.scopes[0] + offset, env[read[a.sum]] if whole and a.sum is not None else None)
            for a in arrivals
        ]

    # --- single nodes --------------------------------------------------------------------------------

    def _recipes(
        self, section: "_Section", template: Template, roots: Mapping[fx.Node, int]
    ) -> list[Recipe]:
        if section.begin not in self.recipes:
            writer = _RecipeWriter(template, section, self.numbers, self.by_name, self.functional, roots)
            nodes = self._between(section, type(template.conditions.module))
            self.recipes[section.begin] = [writer.recipe(node) for node in nodes]
        return self.recipes[section.begin]

    def _between(self, section: "_Section", kind: type) -> Iterator[fx.Node]:
        """The operations between two markers, without those of rehearsals."""
        node = section.begin.next
        while node is not section.border:
            if node in self.skipped:
                node = self.skipped[node]
            elif node.op == "call_function" and node not in self.markers:
                if self.functional.sources.get(node) is section.border:
                    raise Doubt(kind, "it returns a view of something that it writes afterwards")
                if not has_origin(node):
                    raise Doubt(kind, f"its backward computes {node.name} outside autograd's nodes")
                yield node
            node = node.next

    def _write(self, recipe: Recipe, before: fx.Node, env: dict[fx.Node, fx.Node], run: "_Run") -> None:
        """Write a node of a template once more, in front of another."""
        node = recipe.node
        try:
            args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
        except KeyError as missing:
            kind = type(run.application.template.conditions.module)
            raise Doubt(kind, f"it uses {missing.args[0]} from outside") from missing
        number = recipe.number + run.start(recipe.base)
        made = self.inserter(before, f"{recipe.base}_{number}" if number else recipe.base, node, args, kwargs)
        env[node] = made
        meta = node.meta.copy()
        meta[ORIGIN] = run.origin(recipe, env)
        if recipe.function is not None:
            function, name, count, text = recipe.function
            meta["torch_fn"] = (f"{name}_{count + run.called.get(function, 0)}", text)
        made.meta = meta


@dataclass(frozen=True)
class _Section:
    """What lies between two markers, and how far names and functions had been counted when it began."""

    begin: fx.Node
    border: fx.Node
    starts: NameCounts
    called: Counts
    functions: Counts


@dataclass(frozen=True)
class _RecipeWriter:
    template: Template
    section: _Section
    numbers: Mapping[CallSite, int]
    by_name: Mapping[str, fx.Node]
    functional: Functional
    roots: Mapping[fx.Node, int]

    @cached_property
    def _functions(self) -> dict[tuple[str, str], Any]:
        named = ((getattr(f, "__name__", str(f)), f) for f in self.section.functions)
        return {(name, f"{type(f).__name__}.{name}"): f for name, f in named}

    def recipe(self, node: fx.Node) -> Recipe:
        """How to write the node again."""
        origin, first = origin_of(node), self.template.scopes.start
        base, number = base_and_number(node.name)
        forward = None if origin.forward is None else self.functional.value_of(self.by_name[origin.forward])
        return Recipe(
            node=node,
            base=base,
            number=number - self.section.starts.start(base),
            function=self._function(node),
            calls=tuple(self.numbers[site] - first for site in origin.calls),
            place=None if origin.place is None else self.numbers[origin.place] - first,
            forward=forward,
            origin=origin,
            root=self.roots.get(node),
        )

    def _function(self, node: fx.Node) -> tuple[Any, str, int, str] | None:
        if "torch_fn" not in node.meta:
            return None
        numbered, text = node.meta["torch_fn"]
        name, _, count = numbered.rpartition("_")
        function = self._functions.get((name, text))
        if function is None:
            return None
        return function, name, int(count) - self.section.called.get(function, 0), text


@dataclass
class _Run:
    """One section being written for one call."""

    application: Application
    scopes: Sequence[Scope]
    starts: NameCounts
    called: Counts
    outside: Mapping[int, tuple[int, ...]]
    bases: dict[str, int] = field(default_factory=dict)

    def start(self, base: str) -> int:
        """The number before the first one of a base."""
        found = self.bases.get(base)
        if found is None:
            found = self.bases[base] = self.starts.start(base)
        return found

    def origin(self, recipe: Recipe, env: Mapping[fx.Node, fx.Node]) -> Origin:
        """Where a node comes from that is written once more."""
        like, first = recipe.origin, self.application.scopes.start
        calls = tuple(self.scopes[first + number].site for number in recipe.calls)
        if recipe.root is not None:
            outer = (self.scopes[number].site for number in self.outside[recipe.root] if number != PROGRAM)
            calls = tuple(dict.fromkeys((*outer, *calls)))
        forward = None if recipe.forward is None else env.get(recipe.forward)
        return Origin(
            like.phase,
            calls,
            like.quality,
            self.application.caller if like.source == self.application.template.caller else like.source,
            None if forward is None else forward.name,
            None if recipe.place is None else self.scopes[first + recipe.place].site,
            like.recomputed,
            like.hook,
        )


def _instead(link: Link, instead: Mapping[fx.Node, tuple[range, list[Link]]]) -> list[Link]:
    """What stands for a link to the backward of a replayed call; others may have been handed its result."""
    if link.node not in instead:
        return [link]
    scopes, links = instead[link.node]
    if link.scope not in scopes:
        return [replace(link, node=links[-1].sum or links[-1].node)]
    return [replace(links[0], sum=link.sum)] if len(links) == 1 else links


class _Renewed(dict[fx.Node, fx.Node]):
    """Nodes that are written again, found by the nodes that were recorded as well."""

    def __init__(self, env: Mapping[fx.Node, fx.Node], functional: Functional) -> None:
        super().__init__(env)
        self._functional = functional

    def __missing__(self, node: fx.Node) -> fx.Node:
        return self[self._functional.value_of(node)] if self._functional.value_of(node) is not node else _raise(node)


def _raise(node: fx.Node) -> fx.Node:
    raise KeyError(node)


def _node(application: Application) -> fx.Node:
    if application.node is None:
        raise RuntimeError("a call was replayed that has no node")
    return application.node

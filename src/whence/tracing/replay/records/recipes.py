"""How to write the nodes of a recorded call once more: worked out once, followed for every call like it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from whence._torch.graphs import Inserter, NameCounts, base_and_number
from whence.program.node_records import RECORD, NodeRecord, origin_of
from whence.provenance import CallSite, Origin
from whence.provenance.places import PROGRAM
from whence.rewriting.functionalize import Functional
from whence.tracing.log.events import Opened
from whence.tracing.objections import Doubt
from whence.tracing.replay.records.template import Application, Template
from whence.tracing.replay.records.watched_call import Counts

Written = dict[fx.Node, fx.Node]
"""For each node of a record, the one that was written for it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to write one node once more.

    `meta` is all that is known of it but its record. `base` and `number` make its name, `function` the torch
    function it came from and which call of it. The calls of its origin are numbers, counted from that of the
    record; an operation `by_caller` ran in the line that made the call; `root` is the position of the output
    whose own gradient is part of a sum. An origin that is the same for several nodes is one object.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    base: str
    number: int
    function: tuple[Any, str, int, str] | None
    calls: tuple[int, ...]
    place: int | None
    forward: fx.Node | None
    origin: Origin
    by_caller: bool
    root: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of a record, and how far names and torch functions had been counted when it began.

    `roots` are sums that the gradient of an output itself is part of, by the position of the output.
    """

    template: Template
    starts: NameCounts
    called: Counts
    functions: Counts
    roots: Mapping[fx.Node, int]

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], Any]:
        named = ((getattr(function, "__name__", str(function)), function) for function in self.functions)
        return {(name, f"{type(function).__name__}.{name}"): function for name, function in named}

    def function_of(self, node: fx.Node) -> tuple[Any, str, int, str] | None:
        """The torch function that a node came from, its name, which call of it, and how it is spelled."""
        if "torch_fn" not in node.meta:
            return None
        numbered, text = node.meta["torch_fn"]
        name, _, count = numbered.rpartition("_")
        function = self._by_name.get((name, text))
        if function is None:
            return None
        return function, name, int(count) - self.called.get(function, 0), text


@dataclass(frozen=True)
class RecipeWriter:
    """Knows the whole recording: which number each call has, and which node each name had."""

    numbers: Mapping[CallSite, int]
    by_name: Mapping[str, fx.Node]
    functional: Functional
    _origins: dict[Origin, Origin] = field(default_factory=dict)

    def recipes(self, nodes: Iterator[fx.Node], section: Section) -> list[Recipe]:
        """How to write some nodes again."""
        return [self._recipe(node, section) for node in nodes]

    def _recipe(self, node: fx.Node, section: Section) -> Recipe:
        first, origin = section.template.scopes.start, origin_of(node)
        origin = self._origins.setdefault(origin, origin)
        base, number = base_and_number(node.name)
        forward = None if origin.forward is None else self.functional.value_of(self.by_name[origin.forward])
        return Recipe(
            node=node,
            target=node.target,
            args=node.args,
            kwargs=node.kwargs,
            meta={key: value for key, value in node.meta.items() if key != RECORD},
            base=base,
            number=number - section.starts.start(base),
            function=section.function_of(node),
            calls=tuple(self.numbers[site] - first for site in origin.calls),
            place=None if origin.place is None else self.numbers[origin.place] - first,
            forward=forward,
            origin=origin,
            by_caller=origin.source == section.template.caller,
            root=section.roots.get(node),
        )


@dataclass
class RecipeRun:
    """One part of a record being written for one call, in front of the node that stands for it.

    `starts` and `called` are how far names and torch functions had been counted there; `outside` gives for
    each output the calls that its gradients came from.
    """

    application: Application
    before: fx.Node
    scopes: Sequence[Opened]
    starts: NameCounts
    called: Counts
    outside: Mapping[int, tuple[int, ...]]
    written: Written
    _bases: dict[str, int] = field(default_factory=dict)
    _records: dict[int, NodeRecord] = field(default_factory=dict)
    _sites: dict[tuple[int, ...], tuple[CallSite, ...]] = field(default_factory=dict)

    def write(self, recipes: Iterable[Recipe], inserter: Inserter) -> None:
        """Follow recipes, one after another; there is one for nearly every node of a program."""
        written, bases, records, before = self.written, self._bases, self._records, self.before
        read = written.__getitem__
        for recipe in recipes:
            try:
                args = fx.map_arg(recipe.args, read)
                kwargs = fx.map_arg(recipe.kwargs, read) if recipe.kwargs else {}
            except KeyError as missing:
                kind = self.application.template.kind
                raise Doubt(kind, f"it uses {missing.args[0]} from outside") from missing
            base = recipe.base
            start = bases.get(base)
            if start is None:
                start = bases[base] = self.starts.start(base)
            number = recipe.number + start
            name = f"{base}_{number}" if number else base
            made = written[recipe.node] = inserter(before, name, recipe.target, args, kwargs)
            meta = made.meta
            meta.update(recipe.meta)
            known = None if recipe.root is not None else records.get(id(recipe.origin))
            meta[RECORD] = self._record(recipe) if known is None else known
            if recipe.function is not None:
                function, spelled, count, text = recipe.function
                meta["torch_fn"] = (f"{spelled}_{count + self.called.get(function, 0)}", text)

    def _record(self, recipe: Recipe) -> NodeRecord:
        """Where a node comes from that is written once more; one object where several come from one line."""
        made = NodeRecord(self._origin(recipe))
        if recipe.root is None:
            self._records[id(recipe.origin)] = made
        return made

    def _origin(self, recipe: Recipe) -> Origin:
        """Where a node comes from that is written once more."""
        application, like = self.application, recipe.origin
        first, scopes = application.scopes.start, self.scopes
        calls = self._sites.get(recipe.calls)
        if calls is None:
            calls = self._sites[recipe.calls] = tuple(scopes[first + n].site for n in recipe.calls)
        if recipe.root is not None:
            outer = (scopes[number].site for number in self.outside[recipe.root] if number != PROGRAM)
            calls = tuple(dict.fromkeys((*outer, *calls)))
        forward = None if recipe.forward is None else self.written.get(recipe.forward)
        return Origin(
            like.phase,
            calls,
            like.quality,
            application.caller if recipe.by_caller else like.source,
            None if forward is None else forward.name,
            None if recipe.place is None else scopes[first + recipe.place].site,
            like.recomputed,
            like.hook,
        )

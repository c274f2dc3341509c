"""The tree of module calls that a capture saw."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import is_
from typing import Any

from whence._torch.autograd.switches import Switches
from whence._torch.pytrees import TreeSpec, tree_unflatten
from whence.errors import SelectionError
from whence.program.queries.notebook import OpensInNotebook
from whence.provenance import CallSite, ModulePath
from whence.provenance.places import ancestors

FOLD_FROM = 3
"""So many equal neighbours are printed as one."""


@dataclass(frozen=True)
class Named:
    """A leaf that is the value of the node `name`."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A leaf that is the same in every run."""

    value: Any


@dataclass(frozen=True, eq=False)
class Deferred:
    """In the place of a constant: what somebody else leaves at a place, after all that a program computes.

    Where that is a row of values, `item` says which of them is meant.
    """

    place: Any
    item: int | None = None

    def __deepcopy__(self, _known: object) -> "Deferred":
        """A copy of a program looks at the same place."""
        return self

    @property
    def value(self) -> Any:
        """What is there."""
        held = (self.place.found() or self.place).now()
        return held if self.item is None else held[self.item]


@dataclass(frozen=True)
class Absent:
    """A leaf that the program does not compute, because nothing in it uses the value."""

    reason: str

    def __getattr__(self, _name: str) -> Any:
        raise AttributeError(f"there is no value here: {object.__getattribute__(self, 'reason')}")


Leaf = Named | Constant | Absent


@dataclass(frozen=True)
class Structure:
    """A pytree of graph values: how a module was called, or what it returned."""

    spec: TreeSpec
    leaves: tuple[Leaf, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes among the leaves, once each, in order."""
        return tuple(dict.fromkeys(leaf.name for leaf in self.leaves if isinstance(leaf, Named)))

    def renamed(self, names: dict[str, Leaf]) -> "Structure":
        """The same structure over other nodes."""
        leaves = [names.get(leaf.name, leaf) if isinstance(leaf, Named) else leaf for leaf in self.leaves]
        return self if all(map(is_, leaves, self.leaves)) else Structure(self.spec, tuple(leaves))

    def filled(self, values: dict[str, Any]) -> Any:
        """The structure over real values, taken by node name."""
        return tree_unflatten([_leaf_value(leaf, values) for leaf in self.leaves], self.spec)


def _leaf_value(leaf: Leaf, values: dict[str, Any]) -> Any:
    if isinstance(leaf, Named):
        return values[leaf.name]
    if isinstance(leaf, Constant):
        return leaf.value.value if isinstance(leaf.value, Deferred) else leaf.value
    return leaf


@dataclass(frozen=True)
class Call:
    """One call of one module, or (number 0) the program itself.

    `number` is the position in the order of calls and `parent` the call it was made from. `inputs` is the
    structure of `(args, kwargs)` and `outputs` that of the result. `others` are further names of the module,
    where its caller did not read it by one of them: it was handed the module, or a function that holds it.
    `autocast` is as it was then, where somebody noted it: device types with their dtypes. `switches` of the
    process are there where the model had turned them; `records` is false where it had turned autograd off.
    """

    number: int
    site: CallSite
    parent: int
    inputs: Structure | None = None
    outputs: Structure | None = None
    parameters: inspect.Signature | None = None
    others: tuple[ModulePath, ...] = ()
    autocast: tuple[tuple[str, str], ...] | None = None
    switches: Switches = field(default_factory=dict, hash=False)
    records: bool = True

    @property
    def label(self) -> str:
        """The call site, or `(root)`."""
        return f"{'' if self.site.path else '(root)'}{self.site}"

    def __str__(self) -> str:
        return f"{self.label}: {self.site.type}"


@dataclass(frozen=True)
class Calls(OpensInNotebook):
    """All calls in the order they were made; the first is the program.

    `entry` is the call of the model itself, the program where that is no module. `preserved` are calls, by
    number, that keep the original's calling convention: another module may take their place in the tree.
    """

    rows: tuple[Call, ...]
    entry: int = 0
    preserved: frozenset[int] = frozenset()

    @cached_property
    def _children(self) -> dict[int, list[Call]]:
        children: dict[int, list[Call]] = {row.number: [] for row in self.rows}
        for row in self.rows[1:]:
            children[row.parent].append(row)
        return children

    @cached_property
    def _numbers(self) -> dict[tuple[ModulePath, int], int]:
        return {(row.site.path, row.site.index): row.number for row in reversed(self.rows[1:])}

    def __iter__(self) -> Iterator[Call]:
        """The module calls, in the order they were made."""
        return iter(self.rows[1:])

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def program(self) -> Call:
        """The call of the captured callable itself."""
        return self.rows[0]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The number of the caller of each call, by number."""
        return tuple(row.parent for row in self.rows)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each call, by number, the number after the last call inside it.

        A caller comes before what it calls, so a call and the calls inside it are numbered without a gap.
        """
        ends = list(range(1, len(self.rows) + 1))
        for row in reversed(self.rows[1:]):
            ends[row.parent] = max(ends[row.parent], ends[row.number])
        return tuple(ends)

    def within(self, number: int) -> range:
        """The numbers of a call and of the calls inside it."""
        return range(number, self.ends[number])

    def number(self, site: CallSite | None) -> int:
        """The number of the call of a site; None is the program itself."""
        return 0 if site is None else self._numbers[site.path, site.index]

    def children(self, call: Call) -> list[Call]:
        """The calls made directly by `call`."""
        return self._children[call.number]

    def chain(self, call: Call) -> list[Call]:
        """The call and its callers, innermost first, without the program."""
        return [self.rows[number] for number in ancestors(self.parents, call.number) if number]

    def around(self, site: CallSite | None) -> list[int]:
        """The numbers of the call of a site and of its callers, the program last."""
        return ancestors(self.parents, self.number(site))

    def at(self, path: str, index: int = 0) -> Call:
        """The call of a module path; raises `SelectionError` when it was not called that often."""
        wanted = ModulePath.parse(path)
        if (wanted, index) in self._numbers:
            return self.rows[self._numbers[wanted, index]]
        made = sum(call.site.path == wanted for call in self)
        raise SelectionError(
            f"{path or '(root)'} has no call number {index}", why=f"it was called {made} times"
        )

    def __repr__(self) -> str:
        return f"<{len(self):,} calls>"

    def __str__(self) -> str:
        """The tree of calls; three or more neighbours that differ in their number alone are one line."""
        return "\n".join(self._lines(self.program, 0))

    def _lines(self, call: Call, depth: int) -> Iterator[str]:
        for _, group in groupby(self.children(call), key=self._likeness):
            run = list(group)
            others = "" if run[-1].site.path == run[0].site.path else f" … {run[-1].site.name}"
            several = f"{others}  × {len(run)}" if len(run) >= FOLD_FROM else ""
            for child in run[:1] if several else run:
                yield f"{'  ' * depth}{child.label}{several}: {child.site.type}"
                yield from self._lines(child, depth + 1)

    def _likeness(self, call: Call) -> tuple[object, ...]:
        """What neighbours share that are shown as one: members of a list, or calls of one module."""
        path = call.site.path
        return self._shapes[call.number], path.parent, "" if path.name.isdigit() else path.name

    @cached_property
    def _shapes(self) -> list[int]:
        """A number for each call; the same for calls of one class that make the same calls inside."""
        known: dict[object, int] = {}
        shapes = [0] * len(self.rows)
        for row in reversed(self.rows):
            inside = tuple((child.site.path.name, shapes[child.number]) for child in self.children(row))
            shapes[row.number] = known.setdefault((row.site.type, inside), len(known))
        return shapes

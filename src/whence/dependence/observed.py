"""What a capture saw its model read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence.dependence.snapshots import Saved
from whence.errors import Place
from whence.program.arguments.host_state import HostEffect, HostPlace
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.calls import Constant, Structure
from whence.provenance import ModulePath, Source


class Read(NamedTuple):
    """One attribute that was looked up: who holds it, what was found, and by whom it was read.

    There are thousands of them: a tuple is made in a quarter of the time of a frozen dataclass.

    `is_there` is False for a name that was looked for in vain, `is_held` where the run made the value, which
    is not kept then.
    """

    holder: object
    name: str
    value: object
    is_there: bool
    module: ModulePath | None
    source: Source | None
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that the run read first and then wrote: what it left there, unless it deleted it. Of a
    table of a module's it is this `entry` that is otherwise."""

    holder: object
    name: str
    after: Any
    is_there: bool = True
    entry: str = ""


@dataclass(frozen=True)
class Left:
    """What a run left behind for the next one: attributes that it read first, and things outside the model.

    `names` say what they are, the first of them changed at `place`. `tensors` stand for those of the run
    among them; `varies` says that one of these follows from what the call was given, or from random numbers,
    `of_state` that one follows from what the model holds.
    `kept` are the things outside that got such a tensor, each with the tensors that it got. `put` are
    attributes of modules with the numbers, texts and flags that the run gave them, read or not.
    """

    changes: tuple[Change, ...] = ()
    outer: tuple[Saved, ...] = ()
    names: tuple[str, ...] = ()
    place: Place = field(default_factory=Place)
    tensors: tuple[Tensor, ...] = ()
    varies: bool = False
    of_state: bool = False
    kept: tuple[tuple[str, tuple[str, ...]], ...] = ()
    put: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes or self.outer)

    def constants(self) -> Iterator[HostEffect]:
        """The numbers, texts and flags that the run puts somewhere, where all is as it was before it."""
        for path, holder, key, value in self._entries():
            if type(value) in PLAIN:
                structure = Structure(tree_flatten(value)[1], (Constant(value),))
                yield HostEffect(HostPlace(path, holder, key), structure)

    def _entries(self) -> Iterator[tuple[str, Any, Any, Any]]:
        for row in (*self.changes, *self.put):
            if row.is_there and not row.entry:
                yield row.name, own_attributes(row.holder), row.name, row.after
        for saved in self.outer:
            yield from saved.entries()


@dataclass(frozen=True)
class Observed:
    """All reads of one capture, in order, with the modules under all their names.

    `objects` are the other things that attributes led to, in the order they were met. `left` is what the next
    run would find otherwise. `variables` are globals, closures and the environment, as code near the model
    found them, with the beginning of that code. `named` are the names in code of the user that ran or may
    run, `spelled` these and those of a step's own code. At the `places` of a step every run finds something
    else: a container by identity, and a key, or None for what is in it. Tensors that lay on another device
    for the run were `there`, by identity, as these others.
    """

    call: Callable[..., Any]
    roots: tuple[tuple[ModulePath, nn.Module], ...]
    modules: tuple[tuple[ModulePath, nn.Module], ...]
    objects: tuple[object, ...]
    reads: tuple[Read, ...]
    left: Left = field(default_factory=Left)
    variables: tuple[tuple[Outside, Source | None], ...] = ()
    named: frozenset[str] = frozenset()
    spelled: frozenset[str] = frozenset()
    places: frozenset[tuple[int, Any]] = frozenset()
    there: Mapping[int, Tensor] = field(default_factory=dict)

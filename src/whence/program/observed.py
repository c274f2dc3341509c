"""What a capture saw its model read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

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
    """An attribute that the run read first and then wrote: what it left there, unless it deleted it."""

    holder: object
    name: str
    after: Any
    is_there: bool = True


@dataclass(frozen=True)
class Observed:
    """All reads of one capture, in order, with the modules under all their names.

    `objects` are the other things that attributes led to, in the order they were met. `changes` are what the
    next run would find otherwise.
    """

    call: Callable[..., Any]
    roots: tuple[tuple[ModulePath, nn.Module], ...]
    modules: tuple[tuple[ModulePath, nn.Module], ...]
    objects: tuple[object, ...]
    reads: tuple[Read, ...]
    changes: tuple[Change, ...] = ()

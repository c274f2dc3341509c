"""A program's records become plain data; whatever cannot be stored is noted, and named all at once."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from whence._torch.sizes.structure import SizeStructures
from whence.errors import Fault
from whence.interop.archive.records.forms import POOLS
from whence.interop.archive.records.names import Described
from whence.interop.archive.records.values import written_value


@dataclass
class Pool:
    """Rows, each of which is there once."""

    rows: list[Any] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, row: Any) -> int:
        key = json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = self.added(row)
        return self._numbers[key]

    def added(self, row: Any) -> int:
        """The number of a row that is there for itself, also where another equals it."""
        self.rows.append(row)
        return len(self.rows) - 1


@dataclass
class Writer:
    """What is known while a program is written.

    `faults` is what could not be stored. `nodes` gives the number of a node whose arguments are being
    written, `names` those of the nodes of the graph. `described` says what is outside the program: functions,
    classes, variables, constants. `classes` are those of one name.
    """

    described: Described
    faults: list[Fault] = field(default_factory=list)
    sizes: SizeStructures = field(default_factory=SizeStructures)
    pools: dict[str, Pool] = field(default_factory=dict)
    nodes: Callable[[fx.Node], int] | None = None
    names: Mapping[str, int] = field(default_factory=dict)
    classes: dict[str, list[type]] = field(default_factory=dict)
    _known: dict[tuple[str, int], int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def refuse(self, what: str, why: str = "", remedy: str = "") -> None:
        """Note what cannot be stored."""
        self.faults.append(Fault(what, why=why, remedy=remedy))

    def tables(self) -> dict[str, Any]:
        found = {name: pool.rows for name, pool in self.pools.items()}
        return {**found, "symbols": self.sizes.symbols}

    def anything(self, value: Any) -> Any:
        """A value that may be all sorts of things."""
        return written_value(self, value)

    def pool(self, name: str) -> Pool:
        return self.pools.setdefault(name, Pool())

    def pooled(self, name: str, value: Any) -> int:
        """The number of a thing in a pool; looked up by identity first, which costs less than its words."""
        key = name, id(value)
        if key not in self._known:
            self._kept.append(value)
            pool, row = self.pool(name), POOLS[name].write(self, value)
            self._known[key] = pool.added(row) if name == "tensors" else pool.number(row)
        return self._known[key]

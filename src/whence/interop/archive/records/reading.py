"""Plain data becomes a program's records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whence._torch.sizes.structure import SizeReader
from whence._torch.sizes.symbols import mode_for_sizes
from whence.interop.archive.records.checked import (
    LARGEST,
    identifier,
    listed,
    number,
    optional,
    place,
    raise_unless,
    text,
)
from whence.interop.archive.records.forms import POOLS
from whence.interop.archive.records.names import LoadedNames
from whence.interop.archive.records.values import read_value


@dataclass
class Reader:
    """What is known while a program is read.

    `tables` are the pools of the file, `found` says what names stand for, `state` are the tensors of the
    program, `nodes` gives what a number in the arguments of a node stands for, and `names` are those of the
    nodes of the graph. `meshes` are those of the model, over which DTensors are spread. `release` is the one
    that saved the file.
    """

    tables: Mapping[str, Any]
    found: LoadedNames
    state: Mapping[str, Tensor]
    release: str
    nodes: Callable[[int], Any] | None = None
    names: Sequence[str] = ()
    sizes: SizeReader | None = None
    mode: Any = None
    meshes: Mapping[Any, Any] = field(default_factory=dict)
    _pools: dict[str, list[Any]] = field(default_factory=dict)

    def read_tables(self) -> None:
        """Read the pools, each of which may name what is in those before."""
        symbols = self.rows("symbols")
        self.mode = mode_for_sizes(vary=bool(symbols))
        self.sizes = SizeReader(self.mode, [_symbol(*row) for row in symbols]) if symbols else None
        for name, kind in POOLS.items():
            held = self._pools[name] = []
            for row in self.rows(name):
                held.append(kind.read(self, row))

    def rows(self, name: str) -> list[Any]:
        """The rows of a pool as they are in the file."""
        return listed(self.tables.get(name, []))

    def pooled(self, name: str, data: Any) -> Any:
        """What a number stands for in a pool."""
        held = self._pools[name]
        return held[place(data, held)]

    def symbol(self, name: str) -> str:
        """What the symbol is called now that was called so where the file was saved."""
        return name if self.sizes is None else self.sizes.names.get(name, name)

    def anything(self, data: Any) -> Any:
        """What may be all sorts of things."""
        return read_value(self, data)


def _symbol(name: Any, spelled: Any, kind: Any, value: Any, low: Any, high: Any) -> list[Any]:
    limits = [optional(number, each) for each in (value, low, high)]
    raise_unless(kind in ("whole", "real"), "a symbol is no number")
    raise_unless(all(each is None or abs(each) < LARGEST for each in limits), "a symbol has no such limits")
    return [identifier(name), text(spelled), kind, *limits]

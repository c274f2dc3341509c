"""Wishes for sizes become symbols: one for each name, and one for each dimension that has none."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from whence._torch.record.recorder import Recorder
from whence._torch.sizes.dims import DimWish, Freedom
from whence._torch.sizes.symbols import is_symbolic
from whence.errors import InvalidShapes
from whence.program.arguments.open_sizes import Dimension
from whence.tracing.target.dynamic_shapes import DynamicSizes
from whence.tracing.target.example import Example

_SMALLEST = 2
"""A size of 0 or 1 in the example stays: what is recorded of it (broadcasting) holds for no other size."""


def size_names(dynamic: DynamicSizes, names: Sequence[str]) -> dict[Dimension, str]:
    """What the size behind each dimension is called: by its `Dim`, or by the argument and the dimension."""
    found = {at: wish.name for at, wish in dynamic.wishes.items() if wish.freedom is Freedom.NAMED}
    taken = {*found.values()}
    for at in dynamic.wishes:
        if at not in found:
            name = names[at.position] if at.dim is None else f"{names[at.position]}_{at.dim}"
            while name in taken or not name.isidentifier():
                name = f"{name}_" if name.isidentifier() else "size_" + "".join(filter(str.isalnum, name))
            taken.add(name)
            found[at] = name
    return found


def symbols_for(recorder: Recorder, example: Example) -> "Symbols | None":
    """The symbols of an example; None where all sizes are numbers."""
    if example.dynamic is None:
        return None
    if recorder.environment is None:
        raise InvalidShapes(
            "dynamic_shapes was given with inputs or parameters that are fake tensors already",
            why="the sizes of fake tensors are those of the mode that made them",
            remedy="pass real tensors, or tensors on the meta device",
        )
    return Symbols(recorder, example.dynamic, size_names(example.dynamic, example.names))


class Symbols:
    """Gives inputs their sizes."""

    def __init__(self, recorder: Recorder, dynamic: DynamicSizes, names: Mapping[Dimension, str]) -> None:
        self._recorder = recorder
        self._names = names
        self._wishes: dict[tuple[int, int | None], tuple[Dimension, DimWish]] = {
            (at.position, at.dim): (at, wish) for at, wish in dynamic.wishes.items()
        }

    def shape(self, position: int, tensor: Tensor) -> list[Any] | None:
        """The sizes of an input; None where none of them may vary."""
        if not any(at == position for at, _ in self._wishes):
            return None
        return [self._size(position, dim, size) for dim, size in enumerate(tensor.shape)]

    def _size(self, position: int, dim: int, size: int) -> Any:
        if (position, dim) not in self._wishes or size < _SMALLEST:
            return size
        at, wish = self._wishes[position, dim]
        value = (size - wish.offset) // wish.scale
        yields = wish.freedom is not Freedom.NAMED
        base = self._environment.base(self._names[at], value, wish.low or 0, wish.high, yields=yields)
        return base * wish.scale + wish.offset

    def number(self, position: int, value: Any) -> Any:
        """An input that is no tensor: a symbol where it may vary."""
        if (position, None) not in self._wishes:
            return value
        at, wish = self._wishes[position, None]
        return self._environment.number(self._names[at], value, wish.low, wish.high)

    def read_from(self, leaves: Sequence[Any], nodes: Sequence[fx.Node]) -> None:
        """Say of every size which node it is read from."""
        sizes: Any = self._recorder.sizes
        for (position, dim), (_, wish) in self._wishes.items():
            if dim is None:
                sizes.is_held_by(nodes[position], leaves[position])
            elif is_symbolic(leaves[position].shape[dim]):
                sizes.read(nodes[position], dim, leaves[position].shape[dim], wish.scale, wish.offset)

    @property
    def _environment(self) -> Any:
        return self._recorder.environment

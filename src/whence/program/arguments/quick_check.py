"""One look at the flat values of a call, written as code: what `torch.compile` and every call run.

It is true only where nothing is wrong; where it is not, whoever asks finds out what is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.program.arguments.open_sizes import KNOWN_NAMES, Sized, Sizes

Look = Callable[[Sequence[Any]], bool]
"""Looks at the flat values of a call."""


def same_constant(expected: Any, given: Any) -> bool:
    """Equality of type and value; nan is itself, and the two zeros differ."""
    if expected is given:
        return True
    if type(expected) is not type(given) or isinstance(given, Tensor):
        return False
    if isinstance(expected, float):
        return repr(expected) == repr(given)
    return bool(expected == given)


class Conditions:
    """Conditions on the values of a call, and the objects that they name."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"Tensor": Tensor, "same_constant": same_constant}
        self._before: list[str] = []
        self._behind: list[str] = []

    def name_of(self, held: object) -> str:
        """A global name for an object."""
        name = next((name for name, known in self._names.items() if known is held), f"__{len(self._names)}")
        self._names[name] = held
        return name

    def add(self, condition: str) -> None:
        """Anything that is asked before sizes are read."""
        self._before.append(condition)

    def add_of_sizes(self, condition: str) -> None:
        """Anything that is asked of sizes."""
        self._behind.append(condition)

    def tensor(self, at: int, dtype: torch.dtype, shape: Sequence[Sized]) -> None:
        """A tensor of this rank, and of those sizes that are fixed."""
        name = value_at(at)
        self.add(f"isinstance({name}, Tensor) and {name}.dtype is {self.name_of(dtype)}")
        if all(type(size) is int for size in shape):
            self.add(f"{name}.shape == {tuple(shape)}")
            return
        self.add(f"{name}.dim() == {len(shape)}")
        fixed = ((axis, size) for axis, size in enumerate(shape) if type(size) is int)
        for axis, size in fixed:
            self.add(f"{name}.shape[{axis}] == {size}")

    def constant(self, at: int, expected: object) -> None:
        """The same value."""
        name = value_at(at)
        if expected is None or isinstance(expected, bool):
            self.add(f"{name} is {expected}")
        elif type(expected) in (int, str) or (
            type(expected) is float and expected and math.isfinite(expected)
        ):
            self.add(f"type({name}) is {self.name_of(type(expected))} and {name} == {expected!r}")
        else:
            self.add(f"same_constant({self.name_of(expected)}, {name})")

    def compiled(self, count: int, sizes: Sizes | None) -> Look:
        """A function of so many values, which are in order."""
        unpacked = "".join(f"{value_at(at)}, " for at in range(count))
        lines = [f"{unpacked[:-1]} = flat"] if unpacked else []
        lines += [f"if not ({condition}): return False" for condition in self._before]
        if sizes is not None:
            lines += [f"{row.name} = {_read(row.dimension, row.scale, row.offset)}" for row in sizes.readings]
            lines += [f"if not ({rule.condition}): return False" for rule in sizes.rules]
        lines += [f"if not ({condition}): return False" for condition in self._behind]
        names = {**KNOWN_NAMES, **self._names}
        exec(compile("\n    ".join(["def fits(flat):", *lines, "return True"]), "<arguments>", "exec"), names)
        return names["fits"]  # type: ignore[no-any-return]


def value_at(position: int) -> str:
    """The variable of a value."""
    return f"_leaf{position}"


def _read(dimension: Any, scale: int, offset: int) -> str:
    read = value_at(dimension.position) + ("" if dimension.dim is None else f".shape[{dimension.dim}]")
    return read if (scale, offset) == (1, 0) else f"({read} - {offset}) // {scale}"

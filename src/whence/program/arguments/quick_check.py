"""One look at the flat values of a call, written as code: what `torch.compile` and every call run.

It is true only where nothing is wrong; where it is not, whoever asks finds out what is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from whence._torch.plain_values import same_constant
from whence.program.arguments.open_sizes import KNOWN_NAMES, Sized, Sizes

_WHOLE = (int, SymInt)
Look = Callable[[Sequence[Any]], bool]
"""Looks at the flat values of a call."""


class LeafConditions:
    """Writes conditions on the values of a call, and keeps the objects that they name."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {**KNOWN_NAMES, "Tensor": Tensor, "same_constant": same_constant}

    def name_of(self, held: object) -> str:
        name = next((name for name, known in self._names.items() if known is held), f"__{len(self._names)}")
        self._names[name] = held
        return name

    def tensor(self, at: int, dtype: torch.dtype, shape: Sequence[Sized]) -> str:
        """A tensor of this rank, and of those sizes that are fixed."""
        name = value_at(at)
        found = [f"isinstance({name}, Tensor)", f"{name}.dtype is {self.name_of(dtype)}"]
        if all(type(size) is int for size in shape):
            return " and ".join([*found, f"{name}.shape == {tuple(shape)}"])
        found.append(f"{name}.dim() == {len(shape)}")
        found += [f"{name}.shape[{axis}] == {size}" for axis, size in enumerate(shape) if type(size) is int]
        return " and ".join(found)

    def laid_out(self, at: int, expected: Tensor) -> str:
        """A tensor that lies in memory as another one."""
        found = f"{value_at(at)}.layout is {self.name_of(expected.layout)}"
        is_strided = expected.layout is torch.strided
        return f"{found} and {value_at(at)}.stride() == {expected.stride()}" if is_strided else found

    def constant(self, at: int, expected: object) -> str:
        """The same value."""
        name = value_at(at)
        if expected is None or isinstance(expected, bool):
            return f"{name} is {expected}"
        if type(expected) in (int, str) or (type(expected) is float and expected and math.isfinite(expected)):
            return f"type({name}) is {self.name_of(type(expected))} and {name} == {expected!r}"
        return f"same_constant({self.name_of(expected)}, {name})"

    def whole_number(self, at: int) -> str:
        """A whole number, or one that another capture does not know yet."""
        return f"type({value_at(at)}) in {self.name_of(_WHOLE)}"

    def hold(self, condition: str, flat: Sequence[Any]) -> bool:
        return bool(eval(condition, self._names, {value_at(at): value for at, value in enumerate(flat)}))

    def compiled(self, conditions: Sequence[str], count: int, sizes: Sizes | None) -> Look:
        """A function of so many values, which are in order; what is asked of sizes comes last."""
        unpacked = "".join(f"{value_at(at)}, " for at in range(count))
        lines = [f"{unpacked[:-1]} = flat"] if unpacked else []
        lines += [f"if not ({condition}): return False" for condition in conditions]
        if sizes is not None:
            lines += [f"{row.name} = {_read(row.dimension, row.scale, row.offset)}" for row in sizes.readings]
            lines += [f"if not ({rule.condition}): return False" for rule in sizes.rules]
        source = "\n    ".join(["def fits(flat):", *lines, "return True"])
        names = dict(self._names)
        exec(compile(source, "<arguments>", "exec"), names)
        return names["fits"]  # type: ignore[no-any-return]


def value_at(position: int) -> str:
    return f"value{position}_"


def _read(dimension: Any, scale: int, offset: int) -> str:
    read = value_at(dimension.position) + ("" if dimension.dim is None else f".shape[{dimension.dim}]")
    return read if (scale, offset) == (1, 0) else f"({read} - {offset}) // {scale}"

"""Compare two runs, value by value."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whence._torch.tensors import same_bits
from whence.execution.running import Run
from whence.program.plain import AsJSON


@dataclass(frozen=True)
class Comparison(AsJSON):
    """One compared value. `difference` is the largest absolute difference, where one can be taken.

    `differs_in` says in whose backward, and at which line, a gradient becomes another one, of equal ones.
    """

    kind: str
    name: str
    equal: bool
    difference: float | None = None
    note: str = ""
    differs_in: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        size = self.difference
        is_number = size is None or math.isfinite(size)
        return {**asdict(self), "difference": size if is_number else {"number": str(size)}}

    def __str__(self) -> str:
        size = "" if self.difference is None else f" by at most {self.difference:.3g}"
        return f"{self.kind} {self.name} differs{size}{self.note and f': {self.note}'}"


def compare(expected: Run, found: Run) -> tuple[Comparison, ...]:
    """Every value of `expected` beside that of `found`; gradients where eager has them."""
    return (
        *_table("output", expected.outputs, found.outputs),
        *_table("gradient", expected.gradients, _there(found.gradients, expected.gradients)),
        *_table("state", expected.state, found.state),
        *_table("input", expected.inputs, found.inputs),
        *_table("generator", expected.generators, found.generators),
    )


def _there(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of what eager asks for some; a tensor that the model has frozen in its run has none."""
    rows = found.items() if expected else ()
    return {name: value for name, value in rows if name in expected or value is not None}


def _table(kind: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Comparison]:
    for name, value in expected.items():
        if name in found:
            yield beside(kind, name, value, found[name])
        else:
            yield Comparison(kind, name, equal=False, note="missing in the program")
    yield from (
        Comparison(kind, name, equal=False, note="only in the program") for name in found.keys() - expected
    )


def beside(kind: str, name: str, expected: Any, found: Any) -> Comparison:
    """One value of eager beside that of a program."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        equal = type(expected) is type(found) and bool(expected == found)
        return Comparison(
            kind, name, equal, note="" if equal else f"{_short(found)} instead of {_short(expected)}"
        )
    if expected.shape != found.shape or expected.dtype != found.dtype:
        note = f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
        return Comparison(kind, name, equal=False, note=note)
    if same_bits(expected, found):
        return Comparison(kind, name, equal=True)
    return Comparison(kind, name, equal=False, difference=_difference(expected, found))


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _difference(left: Tensor, right: Tensor) -> float:
    left, right = left.to_dense(), right.to_dense()
    wide = torch.complex128 if left.is_complex() else torch.float64
    return float((left.to(wide) - right.to(wide)).abs().max()) if left.numel() else 0.0

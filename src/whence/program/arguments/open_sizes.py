"""Sizes that may vary: how each is read from the inputs, and what all of them must keep.

A size is called by the name of its `Dim`, or by the argument and dimension it comes from. What is computed
from sizes is Python source over these names.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from whence._torch.sizes.exported_sizes import Limits, Multiple, is_number, multiple_of
from whence._torch.sizes.symbols import is_symbolic, names_in, number_of, spelled
from whence.program.plain import AsJSON, plain_fields
from whence.provenance import ModulePath, Source

if TYPE_CHECKING:
    from whence.program.program import FlatProgram


Sized = int | str
"""A size: a number, or Python source over the names of sizes."""
P = TypeVar("P", bound="FlatProgram")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of an input, or (`dim` None) an input that is a whole number.

    `position` is that of the leaf among all arguments, `path` its access.
    """

    position: int
    dim: int | None
    path: str

    def __str__(self) -> str:
        return f"`{self.path}`" if self.dim is None else f"dim {self.dim} of `{self.path}`"

    def of(self, leaves: Sequence[Any]) -> int:
        """The size among the leaves of a call."""
        leaf = leaves[self.position]
        return leaf if self.dim is None else leaf.shape[self.dim]  # type: ignore[no-any-return]


ZERO_ONE = "the example has that size there, and sizes of 0 and 1 are special (broadcasting)"
"""Why a size is fixed of which the example shows 0 or 1."""


@dataclass(frozen=True, slots=True)
class Asker(AsJSON):
    """Who constrained a size: what was written, in `dynamic_shapes`, or a line of code in a module call."""

    asked: str = ""
    module: ModulePath | None = None
    source: Source | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"asked_in": self.asked or None, **plain_fields(self, "module", "source")}

    def __str__(self) -> str:
        if self.asked:
            return self.asked if self.asked == ZERO_ONE else f"{self.asked} in dynamic_shapes"
        module = "" if self.module is None else f"({str(self.module) or 'the model itself'})"
        place = "" if self.source is None else self.source.short
        return " ".join(filter(None, [place, module])) or "the capture"


def relation(condition: str) -> str:
    """A condition that has no shorter words."""
    return f"such that {condition}"


@dataclass(frozen=True, slots=True)
class SizeRule(AsJSON):
    """One thing that sizes must keep.

    `condition` is Python source over names of sizes, and `words` says the same of the first of `dimensions`:
    `at most 512`. `by` asked for it.
    """

    dimensions: tuple[Dimension, ...]
    condition: str
    words: str
    by: Asker

    def __str__(self) -> str:
        return f"{self.words} ({self.by})"

    @property
    def relates(self) -> bool:
        """Whether it says something of several sizes, or of what is computed from them."""
        return self.words == relation(self.condition)

    @property
    def names(self) -> frozenset[str]:
        """The sizes that it speaks of."""
        return frozenset(_compiled(self.condition).co_names) - KNOWN_NAMES.keys()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        dimensions = [plain_fields(row, "path", "dim") for row in self.dimensions]
        return {"dimensions": dimensions, **plain_fields(self, "condition", "words"), **self.by.to_dict()}

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes keep to it; a condition on a size that nobody knows yet holds."""
        try:
            return bool(value_of(self.condition, sizes))
        except NameError:
            return True
        except ArithmeticError:  # division by a size of 0
            return False


@dataclass(frozen=True, slots=True)
class Restriction(AsJSON):
    """A dimension that may vary less than was asked for.

    `asked` is what was written, `kind` is `fixed`, `tied` (to another size), `narrowed` or `multiple`, and
    `allowed` what is left of it. `by` is the code that decided so, and `question` what it did; `statement`
    says what became of the size. `zero_one` says that it was fixed to 0 or 1.
    """

    dimension: Dimension
    asked: str
    kind: str
    allowed: str
    question: str
    by: Asker
    zero_one: bool
    statement: str

    def __str__(self) -> str:
        why = " ".join(filter(None, [str(self.by), self.question]))
        return f"{self.dimension} ({self.asked}) {self.statement} because {why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        own = plain_fields(self, "asked", "kind", "allowed", "question")
        return {**plain_fields(self.dimension, "path", "dim"), **own, **self.by.to_dict()}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the size called `name` is read: it is `dimension`, less `offset`, over `scale`."""

    name: str
    dimension: Dimension
    scale: int = 1
    offset: int = 0

    @property
    def in_words(self) -> str:
        """Where it comes from: `dim 0 of `args[0]``."""
        less = f", less {self.offset}" if self.offset else ""
        return f"{self.dimension}{less}{f', over {self.scale}' if self.scale != 1 else ''}"

    def of(self, leaves: Sequence[Any]) -> int:
        """The size among the leaves of a call."""
        found = self.dimension.of(leaves)
        return found if (self.scale, self.offset) == (1, 0) else (found - self.offset) // self.scale


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call that may vary.

    `readings` give every size its value. `shapes` has the shape of every tensor among the leaves (None for
    others), and `rules` what must hold beyond that.
    """

    readings: tuple[Reading, ...]
    shapes: tuple[tuple[Sized, ...] | None, ...]
    rules: tuple[SizeRule, ...] = ()

    def bound(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The value of every size in a call with tensors of the right rank."""
        return {reading.name: reading.of(leaves) for reading in self.readings}

    def shapes_at(self, given: Mapping[str, int], leaves: Sequence[Any]) -> list[tuple[int, ...] | None]:
        """For each leaf its shape with other values for some sizes; None where none of them is about it."""
        sizes = {**self.bound(leaves), **given}
        return [_at(shape, sizes, given) for shape in self.shapes]


def _at(
    shape: tuple[Sized, ...] | None, sizes: Mapping[str, int], given: Mapping[str, int]
) -> tuple[int, ...] | None:
    names = {name for size in shape or () for name in _compiled(str(size)).co_names}
    return tuple(at(size, sizes) for size in shape or ()) if names & given.keys() else None


def found_of(rule: SizeRule, leaves: Sequence[Any]) -> str:
    """What the sizes of a rule are: all of them where it relates several."""
    rows = rule.dimensions if rule.relates else rule.dimensions[:1]
    return " and ".join(f"{row} is {row.of(leaves)}" for row in rows)


KNOWN_NAMES = {"math": math, "torch": torch, "max": max, "min": min, "abs": abs, "int": int, "float": float}


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


def value_of(text: str, sizes: Mapping[str, int]) -> Any:
    """What an expression of sizes is; raises `NameError` where it names one that is not given."""
    return eval(_compiled(text), KNOWN_NAMES, sizes)


def function_of(text: str, names: Sequence[str]) -> Callable[..., Any]:
    """A function of the sizes of these names, which computes an expression of them."""
    code = compile(f"lambda {', '.join(names)}: {text}", "<size>", "eval")
    return eval(code, dict(KNOWN_NAMES))  # type: ignore[no-any-return]


def at(size: Sized, sizes: Mapping[str, int]) -> int:
    """A size for these values."""
    return size if type(size) is int else value_of(str(size), sizes)


def shape_of(tensor: Tensor) -> tuple[Sized, ...]:
    """The shape of a fake tensor, with sizes that vary spelled out."""
    return tuple(map(sized, tensor.shape))


def strides_of(tensor: Tensor) -> tuple[Sized, ...]:
    """The strides of a fake tensor, likewise."""
    return tuple(map(sized, tensor.stride()))


def sized(size: Any) -> Sized:
    if type(size) is int:
        return size
    return spelled(size) if is_symbolic(size) else number_of(size)


def sizes_of(leaves: Sequence[Any], paths: Sequence[str]) -> Sizes:
    """The sizes that can be read from these leaves, fake tensors some of whose sizes vary, by themselves."""
    readings: dict[str, Reading] = {}
    rules: list[SizeRule] = []
    rows = [
        (Dimension(position, dim, paths[position]), spelled(size), names_in(size))
        for position, leaf in enumerate(leaves)
        for dim, size in _own_sizes(leaf)
        if is_symbolic(size)
    ]
    for dimension, size, _ in rows:
        if size.isidentifier():
            readings.setdefault(size, Reading(size, dimension))
    own = dict(readings)
    for dimension, size, names in rows:
        if size not in readings or readings[size].dimension != dimension:
            reading = Reading(f"_{dimension.position}_{dimension.dim or 0}", dimension)
            readings[reading.name] = reading
            rules.append(
                SizeRule(
                    (dimension,), f"{reading.name} == {size}", _same_size_in_words(size, names, own), Asker()
                )
            )
    shapes = tuple(shape_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
    return Sizes(tuple(readings.values()), shapes, tuple(rules))


def _same_size_in_words(size: str, names: Set[str], own: Mapping[str, Reading]) -> str:
    """What a size must be that is another one, or computed from others."""
    if size in own:
        return f"what {own[size].dimension} is"
    if not names <= set(own):
        return f"of the form {size}"
    return f"{size}, where {' and '.join(f'{name} is {own[name].dimension}' for name in sorted(names))}"


def sizes_within(leaves: Sequence[Any], paths: Sequence[str], limits: Mapping[str, Limits]) -> Sizes:
    """The sizes that can be read from these leaves, and what is left of each within the limits of symbols."""
    sizes = sizes_of(leaves, paths)
    readings = {reading.name: reading for reading in sizes.readings}
    rules = list(sizes.rules)
    bounded: set[str] = set()
    for dimension, found in sorted(_multiples(leaves, paths), key=lambda row: not row[1].is_plain):
        if found.name in bounded:
            continue
        bounded.add(found.name)
        readings.setdefault(found.name, Reading(found.name, dimension, found.scale, found.offset))
        low, high = limits.get(found.symbol, (None, None))
        low = low if low or dimension.dim is None else None  # no dimension has less than 0
        rules += bounds(dimension, found.name, (low, high), Asker(), found.scale, found.offset)
    return Sizes(tuple(readings.values()), sizes.shapes, tuple(rules))


def _multiples(leaves: Sequence[Any], paths: Sequence[str]) -> Iterator[tuple[Dimension, Multiple]]:
    for position, leaf in enumerate(leaves):
        for dim, size in _own_sizes(leaf):
            found = multiple_of(size) if is_number(size) and is_symbolic(size) else None
            if found is not None:
                yield Dimension(position, dim, paths[position]), found


def bounds(
    dimension: Dimension, name: str, limits: Limits, by: Asker, scale: int = 1, offset: int = 0
) -> Iterator[SizeRule]:
    """The rules for a size called `name` that has limits, of which a dimension is a multiple and more."""
    for sign, words, limit in zip((">=", "<="), ("at least", "at most"), limits, strict=True):
        if limit is not None:
            yield SizeRule((dimension,), f"{name} {sign} {limit}", f"{words} {scale * limit + offset}", by)


def _own_sizes(leaf: Any) -> Iterator[tuple[int | None, Any]]:
    """What may be a symbol in a leaf, by dimension."""
    if isinstance(leaf, Tensor):
        yield from enumerate(leaf.shape)
    else:
        yield None, leaf

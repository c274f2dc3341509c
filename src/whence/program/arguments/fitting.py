"""What keeps arguments from fitting: rows, and the errors that are made of them."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from whence._torch.sizes.exported_sizes import is_number, is_open
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic
from whence.errors import CallError
from whence.program.arguments.open_sizes import SizeRule, Sizes, found_of, shape_of
from whence.program.arguments.quick_check import Conditions, Look, same_constant, value_at
from whence.program.calls import Absent
from whence.program.signature import describe


class Misfit(enum.Enum):
    """In what arguments may differ from those of the capture; the value says so."""

    BINDING = "the arguments do not bind"
    STRUCTURE = "the arguments have another structure than those of the capture"
    DEFAULT = "an argument that was left out at capture has another value than its default"
    SIZE = "the capture does not hold for these sizes"
    VALUE = "the arguments do not fit the capture"
    LAYOUT = "a tensor lies otherwise in memory"
    TIED = "one tensor has become two"


@dataclass(frozen=True)
class ArgumentFault:
    """One thing that keeps arguments from fitting.

    `expected` is what was captured at `path`: a structure in words, a value, a rule of sizes. `found` is what
    was given, and `words` say both. `positions` are those of the flat values that it is about.
    """

    kind: Misfit
    path: str
    expected: Any
    found: Any
    words: str
    positions: tuple[int, ...] = ()


_REMEDIES = {
    Misfit.BINDING: "",
    Misfit.STRUCTURE: "call it as it was captured, or capture again with these arguments",
    Misfit.DEFAULT: "leave it out, or capture again with these arguments",
    Misfit.SIZE: "pass inputs of an admitted size (print(program.shapes) lists them), or capture again "
    "with a dynamic_shapes, or an example, that admits this one",
}


def refusal(faults: Sequence[ArgumentFault], *, why: str = "") -> CallError:
    """The error that names all faults; `why` is said where it is not they that say why."""
    words, kind = "; ".join(row.words for row in faults), faults[0].kind
    remedy = _REMEDIES.get(kind, "capture again with these inputs")
    if kind not in _REMEDIES and (sizes := " and ".join(_other_sizes(faults))):
        remedy += f", or with a dynamic_shapes that lets {sizes} vary"
    what = words if why else kind.value if kind in _REMEDIES else Misfit.VALUE.value
    error = CallError(what, why=why or words, remedy=remedy)
    error.misfits = tuple(faults)
    return error


def _other_sizes(faults: Sequence[ArgumentFault]) -> Iterator[str]:
    """The dimensions that have another size than at capture, in tensors of the same rank."""
    for row in faults:
        if not (isinstance(row.expected, Tensor) and isinstance(row.found, Tensor)):
            continue
        if len(row.expected.shape) == len(row.found.shape):
            for dim, size in enumerate(row.expected.shape):
                if not is_symbolic(size) and size != row.found.shape[dim]:
                    yield f"dim {dim} of `{row.path}`"


@dataclass(frozen=True)
class ExpectedLeaves:
    """What the flat values of a call must be: fake tensors or constants, each with its path.

    `sizes` says which of their sizes may vary, `same` which are one tensor. Where `reads_memory`, tensors are
    looked at by their strides; those whose strides the model asked for are in `layouts`.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    sizes: Sizes | None
    same: tuple[tuple[int, int], ...]
    reads_memory: bool
    layouts: frozenset[str]

    def fit(self, flat: Sequence[Any]) -> bool:
        """Whether a quick look finds nothing; where it does, there need not be a fault."""
        try:
            return self.look(flat)
        except (ArithmeticError, NameError):  # a division by 0, or a size that only a run knows
            return False

    @cached_property
    def look(self) -> Look:
        """The quick look, as code that tracers read."""
        conditions = Conditions()
        for at, expected in enumerate(self.leaves):
            if isinstance(expected, Tensor):
                shape = shape_of(expected) if self.sizes is None else self.sizes.shapes[at]
                conditions.tensor(at, expected.dtype, shape or ())
                if self._is_laid_out(at):
                    conditions.add(f"{value_at(at)}.stride() == {expected.stride()}")
            elif isinstance(expected, SYMBOLIC):
                conditions.add(f"type({value_at(at)}) is int")
            elif not isinstance(expected, Absent):
                conditions.constant(at, expected)
        for first, second in self.same:
            conditions.add(f"{value_at(first)} is {value_at(second)}")
        return conditions.compiled(len(self.leaves), self.sizes)

    def _is_laid_out(self, at: int) -> bool:
        return (self.reads_memory or self.paths[at] in self.layouts) and not is_open(self.leaves[at])

    def faults(self, flat: Sequence[Any]) -> list[ArgumentFault]:
        """Everything that does not fit; what needs the right tensors is asked of these only."""
        found = [row for at, given in enumerate(flat) if (row := self._value(at, given)) is not None]
        if self.sizes is not None and not found and (rules := [*self.sizes.broken(flat)]):
            return [_of_size(rule, flat) for rule in rules]
        if not found:
            found += [row for at, given in enumerate(flat) if (row := self._layout(at, given)) is not None]
        return found + [self._tied(*pair) for pair in self.same if flat[pair[0]] is not flat[pair[1]]]

    def _value(self, at: int, given: Any) -> ArgumentFault | None:
        path, expected = self.paths[at], self.leaves[at]
        if isinstance(expected, Tensor):
            if not isinstance(given, Tensor):
                words = f"{path} was a tensor {describe(expected)} at capture, is {given!r}"
            elif expected.dtype == given.dtype and self._admits(at, given):
                return None
            else:
                words = f"{path} was {describe(expected)} at capture, is {describe(given)}"
        elif isinstance(expected, SYMBOLIC):
            if type(given) is int or is_number(given):
                return None
            words = f"{path} was a whole number at capture, is {describe(given)}"
        elif isinstance(expected, Absent) or same_constant(expected, given):
            return None
        else:
            words = f"{path} was {expected!r} at capture, is {describe(given)}"
        return ArgumentFault(Misfit.VALUE, path, expected, given, words, (at,))

    def _admits(self, at: int, given: Tensor) -> bool:
        expected: Tensor = self.leaves[at]
        return expected.shape == given.shape if self.sizes is None else self.sizes.admits(at, given.shape)

    def _layout(self, at: int, given: Any) -> ArgumentFault | None:
        path, expected = self.paths[at], self.leaves[at]
        if (
            not isinstance(expected, Tensor)
            or not self._is_laid_out(at)
            or expected.stride() == given.stride()
        ):
            return None
        why = "the program reads memory" if self.reads_memory else "the model asked for them"
        words = f"{path} had strides {expected.stride()} at capture, has {given.stride()}; {why}"
        return ArgumentFault(Misfit.LAYOUT, path, expected, given, words, (at,))

    def _tied(self, first: int, second: int) -> ArgumentFault:
        words = f"{self.paths[first]} and {self.paths[second]} were one tensor at capture, and are two now"
        return ArgumentFault(
            Misfit.TIED, self.paths[first], "one tensor", "two tensors", words, (first, second)
        )


def _of_size(rule: SizeRule, flat: Sequence[Any]) -> ArgumentFault:
    found = found_of(rule, flat)
    positions = tuple(row.position for row in rule.dimensions)
    words = f"{found}, and must be {rule.words}: {rule.by}"
    return ArgumentFault(Misfit.SIZE, str(rule.dimensions[0]), rule, found, words, positions)

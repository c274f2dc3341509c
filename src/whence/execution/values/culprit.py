"""Which of several passes made a program compute something else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from whence._torch.tensors import same_bits
from whence.errors import UsageError
from whence.execution.values.first import First, first_difference
from whence.execution.values.walk import Given, detached, drawing_again, inputs_of, walk
from whence.program import FlatProgram
from whence.program.arguments.variants import fitting
from whence.rewriting import GraphPass, Pass, apply

P = TypeVar("P", bound=FlatProgram)


@dataclass(frozen=True)
class Culprit:
    """The pass that changed what is computed: its name, which of the passes it is, the programs around it.

    `outputs` are those whose values differ between them, `first` is the first operation that differs; where
    a check of one's own was asked, they may be empty and None.
    """

    name: str
    position: int
    before: FlatProgram
    after: FlatProgram
    outputs: tuple[str, ...]
    first: First | None

    def __str__(self) -> str:
        found = ", ".join(self.outputs) or "what the check looks at"
        node = "" if self.first is None else f"; the first operation is {self.first}"
        return f"pass {self.position}, {self.name}, changes {found}{node}"


@dataclass
class _Passes:
    """The programs after so many of the passes, each made when it is asked for."""

    first: FlatProgram
    passes: Sequence[Pass | GraphPass]

    @cached_property
    def made(self) -> list[FlatProgram]:
        return [self.first]

    def after(self, count: int) -> FlatProgram:
        while len(self.made) <= count:
            self.made.append(apply(self.made[-1], self.passes[len(self.made) - 1]))
        return self.made[count]


def culprit(
    program: P, passes: Sequence[Pass | GraphPass], given: Given, check: Callable[[P], object] | None
) -> Culprit | None:
    """Halve the passes between a program that is right and one that is not, until one is left."""
    if not isinstance(passes, Sequence):
        given = type(passes).__name__
        raise UsageError(f"expected passes in order, got {given}", remedy="give a list of them")
    made = _Passes(program, passes)
    expected = None if check is not None else _output_values(program, given)

    def is_right(count: int) -> bool:
        found: Any = made.after(count)
        return bool(check(found)) if check is not None else not _different(expected or {}, found, given)

    if not is_right(0):
        raise UsageError("the check fails before any pass", remedy="give a program for which it holds")
    right, wrong = 0, len(passes)
    if is_right(wrong):
        return None
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if is_right(middle) else (right, middle)
    return _culprit_at(made, wrong, given, can_run=check is None)


def _culprit_at(made: _Passes, wrong: int, given: Given, *, can_run: bool) -> Culprit:
    before, after = made.after(wrong - 1), made.after(wrong)
    name = after.history[-1].name
    if not can_run:
        return Culprit(name, wrong - 1, before, after, (), None)
    outputs = _different(_output_values(before, given), after, given)
    return Culprit(name, wrong - 1, before, after, outputs, _first(before, after, given))


def _first(before: FlatProgram, after: FlatProgram, given: Given) -> First | None:
    args, kwargs, _ = given
    before, after = fitting(before, args, kwargs), fitting(after, args, kwargs)
    with drawing_again(after):
        return first_difference(after, before, given)


def _output_values(program: FlatProgram, given: Given) -> dict[str, Any]:
    """The values of all outputs by name, from the random state of now, which stays as it is."""
    args, kwargs, _ = given
    program = fitting(program, args, kwargs)
    nodes = frozenset(row.node for row in program.signature.outputs if row.node is not None)
    inputs = inputs_of(program, *given)
    values: Mapping[str, Any] = {}
    with drawing_again(program):
        for _, now in walk(program, inputs, keep=nodes):
            values = now
    rows = program.signature.outputs
    return {row.name: row.value if row.node is None else detached(values[row.node]) for row in rows}


def _different(expected: Mapping[str, Any], program: FlatProgram, given: Given) -> tuple[str, ...]:
    found = _output_values(program, given)
    return tuple(name for name, value in expected.items() if not _same(value, found[name]))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)

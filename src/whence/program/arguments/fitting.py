"""What keeps arguments from fitting: rows, and the errors that are made of them."""

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

from whence._torch.autograd.mode_questions import mode_now
from whence._torch.plain_values import same_constant
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic
from whence._torch.tensor_questions import Answer, as_code, asked_of, spelled
from whence._torch.tensors import autocast_in_words
from whence.errors import CallError, Place
from whence.program.arguments.open_sizes import (
    KNOWN_NAMES,
    Sized,
    SizeRule,
    Sizes,
    found_of,
    shape_of,
    strides_of,
)
from whence.program.calls import Absent
from whence.program.signature import describe, in_words
from whence.provenance import Source
from whence.schema import TensorFact

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

    def laid_out(
        self, at: int, layout: torch.layout, strides: Mapping[int, Sized], may_be_one: Set[int]
    ) -> str:
        """A tensor of this layout, with these strides along these dimensions.

        Those that `may_be_one` in a run have none that count then.
        """
        name = value_at(at)
        rows = [(axis, f"{name}.stride({axis}) == {stride}") for axis, stride in strides.items()]
        found = [f"({name}.shape[{axis}] < 2 or {row})" if axis in may_be_one else row for axis, row in rows]
        return " and ".join([f"{name}.layout is {self.name_of(layout)}", *found])

    def placed(self, at: int, device: torch.device, *, there: bool) -> str:
        """A tensor on a device of this type, or on this very one (`there`)."""
        own = f"{value_at(at)}.device"
        return f"{own} == {self.name_of(device)}" if there else f"{own}.type == {device.type!r}"

    def constant(self, at: int, expected: object) -> str:
        """The same value."""
        name = value_at(at)
        if expected is None or isinstance(expected, bool):
            return f"{name} is {expected}"
        if type(expected) in (int, str) or (type(expected) is float and expected and math.isfinite(expected)):
            return f"type({name}) is {self.name_of(type(expected))} and {name} == {expected!r}"
        return f"same_constant({self.name_of(expected)}, {name})"

    def answered(self, query: "InputQuery") -> str:
        """A tensor that answers as at capture."""
        name, question = value_at(query.position), query.question
        now = as_code(question, name) or f"{self.name_of(asked_of)}({name}, {question!r})"
        return f"same_constant({self.name_of(query.answer)}, {now})"

    def whole_number(self, at: int) -> str:
        """A whole number, or one that another capture does not know yet."""
        return f"type({value_at(at)}) in {self.name_of(_WHOLE)}"

    def hold(self, condition: str, flat: Sequence[Any], sizes: Mapping[str, int]) -> bool:
        """Whether values keep to it; a condition on a size that nobody knows holds."""
        try:
            own = {value_at(at): value for at, value in enumerate(flat)}
            return bool(eval(condition, self._names, {**own, **sizes}))
        except NameError:
            return True

    def compiled(self, first: Sequence[str], then: Sequence[str], count: int, sizes: Sizes | None) -> Look:
        """A function of so many values, which are in order; what is asked of sizes comes between."""
        unpacked = "".join(f"{value_at(at)}, " for at in range(count))
        lines = [f"{unpacked[:-1]} = flat"] if unpacked else []
        lines += [f"if not ({condition}): return False" for condition in first]
        if sizes is not None:
            lines += [
                f"{row.name} = {_size_read(row.dimension, row.scale, row.offset)}" for row in sizes.readings
            ]
            lines += [f"if not ({rule.condition}): return False" for rule in sizes.rules]
        lines += [f"if not ({condition}): return False" for condition in then]
        source = "\n    ".join(["def fits(flat):", *lines, "return True"])
        names = dict(self._names)
        exec(compile(source, "<arguments>", "exec"), names)
        return names["fits"]  # type: ignore[no-any-return]


def value_at(position: int) -> str:
    return f"value{position}_"


def _size_read(dimension: Any, scale: int, offset: int) -> str:
    read = value_at(dimension.position) + ("" if dimension.dim is None else f".shape[{dimension.dim}]")
    return read if (scale, offset) == (1, 0) else f"({read} - {offset}) // {scale}"


class Misfit(enum.Enum):
    """In what arguments may differ from those of the capture; the value says so."""

    BINDING = "the arguments do not bind"
    STRUCTURE = "the arguments have another structure than those of the capture"
    DEFAULT = "an argument that was left out at capture has another value than its default"
    SIZE = "the capture does not hold for these sizes"
    VALUE = "the arguments do not fit the capture"
    DEVICE = "a tensor is on another device"
    LAYOUT = "a tensor lies otherwise in memory"
    FACT = "a tensor is otherwise in what the model asked of it"
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


def other_autocast(captured: tuple[tuple[str, str], ...], now: tuple[tuple[str, str], ...]) -> CallError:
    """The error for a call under another autocast."""
    return CallError(
        f"autocast was {autocast_in_words(captured)} at capture, and is {autocast_in_words(now)}",
        why="the casts are part of the captured graph",
        remedy="call it as it was captured, or capture inside the autocast region",
    )


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
class InputQuery:
    """What the model asked of the argument at a position, beside its numbers and its shape, and heard."""

    position: int
    question: str
    answer: Answer
    call: str
    source: Source | None

    @property
    def asked(self) -> tuple[int, str]:
        """What is asked of which argument."""
        return self.position, self.question


class _Row(NamedTuple):
    """What is asked of values; `fact` is what of a tensor, where that is its own, and `query` who asked."""

    kind: Misfit
    positions: tuple[int, ...]
    condition: str
    fact: str = ""
    query: InputQuery | None = None


@dataclass(frozen=True)
class ExpectedLeaves:
    """What the flat values of a call must be: fake tensors or constants, each with its path.

    `sizes` says which of their sizes may vary, `same` which are one tensor. Where `reads_memory`, tensors are
    looked at by their strides; those whose strides the model asked for are in `layouts`, what else it asked
    of which in `facts`, and what the tensors of the capture themselves answered in `questions`.

    That is all for which a call is refused. `watched` is for who wants to know what else may have decided
    something: the positions of tensors whose strides may have.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    sizes: Sizes | None
    same: tuple[tuple[int, int], ...]
    reads_memory: bool
    layouts: frozenset[str]
    facts: tuple[tuple[str, TensorFact], ...] = ()
    questions: tuple[InputQuery, ...] = ()
    watched: frozenset[int] | None = None

    def fit(self, flat: Sequence[Any]) -> bool:
        """Whether a quick look finds nothing; where it does, there need not be a fault."""
        try:
            return self.look(flat)
        except (ArithmeticError, NameError):  # a division by 0, or a size that only a run knows
            return False

    @cached_property
    def look(self) -> Look:
        """The quick look, as code that tracers read."""
        first = [row.condition for row in self._rows if row.kind is Misfit.VALUE]
        then = [row.condition for row in self._rows if row.kind is not Misfit.VALUE]
        return self._conditions.compiled(first, then, len(self.leaves), self.sizes)

    @cached_property
    def _conditions(self) -> LeafConditions:
        return LeafConditions()

    @cached_property
    def _rows(self) -> tuple[_Row, ...]:
        """What is asked of values, row by row."""
        return tuple(self._asked())

    def _asked(self) -> Iterator[_Row]:
        ask = self._conditions
        for at, expected in enumerate(self.leaves):
            if isinstance(expected, Tensor):
                yield from self._asked_of_tensor(at, expected)
            elif isinstance(expected, SYMBOLIC):
                yield _Row(Misfit.VALUE, (at,), ask.whole_number(at))
            elif not isinstance(expected, Absent):
                yield _Row(Misfit.VALUE, (at,), ask.constant(at, expected))
        for first, second in self.same:
            yield _Row(Misfit.TIED, (first, second), f"{value_at(first)} is {value_at(second)}")

    def _asked_of_tensor(self, at: int, expected: Tensor) -> Iterator[_Row]:
        ask, is_watched = self._conditions, self.watched is not None
        shape = shape_of(expected) if self.sizes is None else self.sizes.shapes[at] or ()
        yield _Row(Misfit.VALUE, (at,), ask.tensor(at, expected.dtype, shape))
        if is_watched or expected.device.type != "meta":  # where a plan was made, for any device
            yield _Row(Misfit.DEVICE, (at,), ask.placed(at, expected.device, there=is_watched))
        if (strides := self._strides(at, expected, shape)) is not None or is_watched:
            is_asked = self.paths[at] in self.layouts
            may_be_one = {axis for axis, size in enumerate(shape) if type(size) is not int and not is_asked}
            yield _Row(Misfit.LAYOUT, (at,), ask.laid_out(at, expected.layout, strides or {}, may_be_one))
        asked = {fact for path, fact in self.facts if path == self.paths[at]}
        for fact in sorted(asked | ({TensorFact.REQUIRES_GRAD} if is_watched else set())):
            condition = f"{value_at(at)}.{fact} == {_answer(expected, fact)}"
            yield _Row(Misfit.FACT, (at,), condition, fact)
        for query in (query for query in self.questions if query.position == at):
            yield _Row(Misfit.FACT, (at,), ask.answered(query), query.question, query)

    def _strides(self, at: int, expected: Tensor, shape: Sequence[Sized]) -> Mapping[int, Sized] | None:
        """The strides that count, by dimension; None where none does.

        Where there is one element or none they mean nothing, unless it was the model that asked.
        """
        is_asked = self.paths[at] in self.layouts
        if not (is_asked or self.reads_memory or at in (self.watched or ())):
            return None
        rows = enumerate(strides_of(expected) if expected.layout is torch.strided else ())
        return {axis: stride for axis, stride in rows if is_asked or shape[axis] not in (0, 1)}

    def faults(self, flat: Sequence[Any]) -> list[ArgumentFault]:
        """Everything that does not fit; what needs the right tensors is asked of these only."""
        found = [self._fault(row, flat) for row in self._broken(flat, {}, of={Misfit.VALUE})]
        wrong = {at for row in found for at in row.positions}
        sizes = {} if self.sizes is None or found else self.sizes.bound(flat)
        if self.sizes is not None and not found:
            found += [_of_size(rule, flat) for rule in self.sizes.rules if not rule.holds(sizes)]
        others = self._broken(flat, sizes, of={Misfit.DEVICE, Misfit.LAYOUT, Misfit.FACT}, but=wrong)
        ties = self._broken(flat, sizes, of={Misfit.TIED})
        return [*found, *(self._fault(row, flat) for row in (*others, *ties))]

    def _broken(
        self, flat: Sequence[Any], sizes: Mapping[str, int], *, of: Set[Misfit], but: Set[int] = frozenset()
    ) -> list[_Row]:
        rows = (row for row in self._rows if row.kind in of and but.isdisjoint(row.positions))
        return [row for row in rows if not self._conditions.hold(row.condition, flat, sizes)]

    def _fault(self, row: _Row, flat: Sequence[Any]) -> ArgumentFault:
        at = row.positions[0]
        words = self._words(row, flat)
        if row.query is not None:
            now = asked_of(flat[at], row.fact)
            return ArgumentFault(row.kind, self.paths[at], row.query, now, words, row.positions)
        return ArgumentFault(row.kind, self.paths[at], self.leaves[at], flat[at], words, row.positions)

    def _words(self, row: _Row, flat: Sequence[Any]) -> str:
        (kind, positions, _, fact, query), at = row, row.positions[0]
        path, expected, given = self.paths[at], self.leaves[at], flat[at]
        if kind is Misfit.TIED:
            return f"{path} and {self.paths[positions[1]]} were one tensor at capture, and are two now"
        if kind is Misfit.DEVICE:
            return f"{path} was on {expected.device} at capture, is on {given.device}"
        if kind is Misfit.LAYOUT:
            why = "the program reads memory" if self.reads_memory else "the model asked for them"
            now = _lying(given).removeprefix("strides ")
            return f"{path} had {_lying(expected)} at capture, has {now}; {why}"
        if query is not None:
            what, answer = spelled(fact, path), asked_of(given, fact)
            return f"{what} was {query.answer!r} at capture, is {answer!r}; the model asked for it"
        if kind is Misfit.FACT:
            was, now = _answer(expected, fact), _answer(given, fact)
            return f"{path}.{fact} was {was} at capture, is {now}; the model asked for it"
        if isinstance(expected, Tensor) and not isinstance(given, Tensor):
            return f"{path} was a tensor {describe(expected)} at capture, is {in_words(given)}"
        was = in_words(expected)
        was = "a whole number" if isinstance(expected, SYMBOLIC) else was
        return f"{path} was {was} at capture, is {in_words(given)}"


def _answer(tensor: Tensor, fact: str) -> Any:
    name = fact.removesuffix("()")
    found = getattr(tensor, name)
    return found if name == fact else found()


def _lying(tensor: Tensor) -> str:
    strided = tensor.layout is torch.strided
    return f"strides {tensor.stride()}" if strided else f"the layout {tensor.layout}"


def _of_size(rule: SizeRule, flat: Sequence[Any]) -> ArgumentFault:
    found = found_of(rule, flat)
    positions = tuple(row.position for row in rule.dimensions)
    words = f"{found}, and must be {rule.words}: {rule.by}"
    return ArgumentFault(Misfit.SIZE, str(rule.dimensions[0]), rule, found, words, positions)


@dataclass(frozen=True)
class ModeQuery:
    """A mode that the model asked for: how it was, and the call and the line that asked."""

    name: str
    value: bool
    call: str
    source: Source | None

    @property
    def holds(self) -> bool:
        """Whether the mode is now as it was."""
        return mode_now(self.name) == self.value


def refuse_other_modes(asked: Sequence[ModeQuery]) -> None:
    """Raise `CallError` where a mode is not as it was."""
    for mode in asked:
        if not mode.holds:
            raise _other_mode(mode)


def _other_mode(asked: ModeQuery) -> CallError:
    was, now = ("on", "off") if asked.value else ("off", "on")
    return CallError(
        f"{asked.name} was {was} at capture, and is {now}",
        where=Place(asked.call, None if asked.source is None else str(asked.source)),
        why="the model asks for it there, and what it computes then is part of the captured graph",
        remedy="call it in the mode of the capture; capture again in this mode; or call "
        'program.guarded(model, on_violation="recapture"), which does so where a mode has changed',
    )

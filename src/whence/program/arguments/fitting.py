"""What keeps arguments from fitting: rows, and the errors that are made of them."""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor

from whence._torch.autograd.mode_questions import mode_now
from whence._torch.plain_values import same_constant
from whence._torch.sizes.exported_sizes import is_open
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic
from whence._torch.tensors import autocast_in_words
from whence.errors import CallError, Place
from whence.program.arguments.open_sizes import KNOWN_NAMES, Sized, SizeRule, Sizes, found_of, shape_of
from whence.program.calls import Absent
from whence.program.signature import describe
from whence.provenance import Source

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

    def placed(self, at: int, device: torch.device) -> str:
        """A tensor on a device of this type."""
        return f"{value_at(at)}.device.type == {device.type!r}"

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


class Misfit(enum.Enum):
    """In what arguments may differ from those of the capture; the value says so."""

    BINDING = "the arguments do not bind"
    STRUCTURE = "the arguments have another structure than those of the capture"
    DEFAULT = "an argument that was left out at capture has another value than its default"
    SIZE = "the capture does not hold for these sizes"
    VALUE = "the arguments do not fit the capture"
    DEVICE = "a tensor is on another device"
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
        conditions = [condition for _, _, condition in self._rows]
        return self._conditions.compiled(conditions, len(self.leaves), self.sizes)

    @cached_property
    def _conditions(self) -> LeafConditions:
        return LeafConditions()

    @cached_property
    def _rows(self) -> tuple[tuple[Misfit, tuple[int, ...], str], ...]:
        """What is asked of values, row by row."""
        return tuple(self._asked())

    def _asked(self) -> Iterator[tuple[Misfit, tuple[int, ...], str]]:
        ask = self._conditions
        for at, expected in enumerate(self.leaves):
            if isinstance(expected, Tensor):
                shape = shape_of(expected) if self.sizes is None else self.sizes.shapes[at] or ()
                yield Misfit.VALUE, (at,), ask.tensor(at, expected.dtype, shape)
                if expected.device.type != "meta":  # where a plan was made, for any device
                    yield Misfit.DEVICE, (at,), ask.placed(at, expected.device)
            elif isinstance(expected, SYMBOLIC):
                yield Misfit.VALUE, (at,), ask.whole_number(at)
            elif not isinstance(expected, Absent):
                yield Misfit.VALUE, (at,), ask.constant(at, expected)
            is_asked = self.reads_memory or self.paths[at] in self.layouts
            if is_asked and isinstance(expected, Tensor) and not is_open(expected):
                yield Misfit.LAYOUT, (at,), ask.laid_out(at, expected)
        for first, second in self.same:
            yield Misfit.TIED, (first, second), f"{value_at(first)} is {value_at(second)}"

    def faults(self, flat: Sequence[Any]) -> list[ArgumentFault]:
        """Everything that does not fit; what needs the right tensors is asked of these only."""
        found = self._broken(Misfit.VALUE, flat)
        if self.sizes is not None and not found and (rules := [*self.sizes.broken(flat)]):
            return [_of_size(rule, flat) for rule in rules]
        found = found or [*self._broken(Misfit.DEVICE, flat), *self._broken(Misfit.LAYOUT, flat)]
        return [*found, *self._broken(Misfit.TIED, flat)]

    def _broken(self, kind: Misfit, flat: Sequence[Any]) -> list[ArgumentFault]:
        rows = ((positions, condition) for of, positions, condition in self._rows if of is kind)
        return [
            ArgumentFault(kind, self.paths[at], self.leaves[at], flat[at], words, positions)
            for positions, condition in rows
            if not self._conditions.hold(condition, flat)
            for at, words in [(positions[0], self._words(kind, positions, flat))]
        ]

    def _words(self, kind: Misfit, positions: tuple[int, ...], flat: Sequence[Any]) -> str:
        at = positions[0]
        path, expected, given = self.paths[at], self.leaves[at], flat[at]
        if kind is Misfit.TIED:
            return f"{path} and {self.paths[positions[1]]} were one tensor at capture, and are two now"
        if kind is Misfit.DEVICE:
            return f"{path} was on {expected.device} at capture, is on {given.device}"
        if kind is Misfit.LAYOUT:
            why = "the program reads memory" if self.reads_memory else "the model asked for them"
            now = _lying(given).removeprefix("strides ")
            return f"{path} had {_lying(expected)} at capture, has {now}; {why}"
        if isinstance(expected, Tensor) and not isinstance(given, Tensor):
            return f"{path} was a tensor {describe(expected)} at capture, is {given!r}"
        was = describe(expected) if isinstance(expected, Tensor) else repr(expected)
        was = "a whole number" if isinstance(expected, SYMBOLIC) else was
        return f"{path} was {was} at capture, is {describe(given)}"


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

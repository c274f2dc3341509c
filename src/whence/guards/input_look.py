"""One quick look at inputs that are spelled as the example was, tensor by tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence.program import Convention
from whence.program.arguments.quick_check import LeafConditions, Look, value_at
from whence.program.guards.expectations import ExpectedConstant, ExpectedWords, TensorFacts
from whence.program.guards.rows import Guard
from whence.schema import GuardKind

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class InputGlance:
    """So many positional inputs and keywords, nothing of which is nested, and a look at what they are."""

    spelling: tuple[int, tuple[str, ...]]
    look: Look


def input_glance_of(guards: Sequence[Guard], convention: Convention) -> InputGlance | None:
    """What to look at, where a quick look will do: no containers, no aliasing, nothing but plain values."""
    spelling = convention.flat_call
    if spelling is None or any(guard.kind is GuardKind.ALIASING for guard in guards):
        return None
    ask = LeafConditions()
    rows = [guard for guard in guards if guard.positions and guard.kind is GuardKind.INPUT]
    asked = [condition for guard in rows if (condition := _asked(ask, guard))]
    if len(asked) != len(convention.leaves):
        return None
    strides = [text for guard in rows if (text := _strides(guard))]
    return InputGlance(spelling, ask.compiled(asked, len(asked), convention.sizes, strides))


def _asked(ask: LeafConditions, guard: Guard) -> str:
    """What one guard expects, where it is plain."""
    expected, at = guard.expected, guard.positions[0]
    if isinstance(expected, ExpectedWords):
        return ask.whole_number(at)
    if isinstance(expected, ExpectedConstant):
        return ask.constant(at, expected.value)
    if not isinstance(expected, TensorFacts):
        return ""
    value = value_at(at)
    return (
        f"type({value}) in {ask.name_of(_PLAIN)} and {value}.requires_grad is {expected.requires_grad} "
        f"and {value}.layout is {ask.name_of(expected.layout)} "
        f"and {ask.tensor(at, expected.dtype, expected.shape)} "
        f"and {value}.device == {ask.name_of(expected.device)}"
    )


def _strides(guard: Guard) -> str:
    if not isinstance(guard.expected, TensorFacts) or guard.expected.strides is None:
        return ""
    strides = "".join(f"{stride}, " for stride in guard.expected.strides)
    return f"{value_at(guard.positions[0])}.stride() == ({strides})"


def inputs_are_as_they_were(glance: InputGlance, args: object, kwargs: object) -> bool:
    """Whether every input is what it was; if not, that need not be a violation."""
    given: Any = {} if kwargs is None else kwargs
    if type(args) is not tuple or type(given) is not dict or (len(args), tuple(given)) != glance.spelling:
        return False
    try:
        return glance.look((*args, *given.values()))
    except (ArithmeticError, NameError):  # a division by 0, or a size that only a run knows
        return False

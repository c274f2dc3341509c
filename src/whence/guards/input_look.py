"""One quick look at inputs that are spelled as the example was, tensor by tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence.program import Convention
from whence.program.arguments.quick_check import Conditions, Look, value_at
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
    conditions = Conditions()
    count = 0
    for guard in guards:
        if guard.positions and guard.kind is GuardKind.INPUT:
            count += _write(conditions, value_at(guard.positions[0]), guard)
    if count != len(convention.leaves):
        return None
    return InputGlance(spelling, conditions.compiled(count, convention.sizes))


def _write(conditions: Conditions, value: str, guard: Guard) -> bool:
    """Write down what one guard expects, where it is plain."""
    expected = guard.expected
    if isinstance(expected, ExpectedWords):
        conditions.add(f"type({value}) is int")
    elif isinstance(expected, ExpectedConstant):
        conditions.constant(guard.positions[0], expected.value)
    elif isinstance(expected, TensorFacts):
        conditions.add(f"type({value}) in {conditions.name_of(_PLAIN)}")
        conditions.add(f"{value}.requires_grad is {expected.requires_grad}")
        conditions.add(f"{value}.layout is {conditions.name_of(expected.layout)}")
        conditions.tensor(guard.positions[0], expected.dtype, expected.shape)
        conditions.add(f"{value}.device == {conditions.name_of(expected.device)}")
        if expected.strides is not None:
            strides = "".join(f"{stride}, " for stride in expected.strides)
            conditions.add_of_sizes(f"{value}.stride() == ({strides})")
    return isinstance(expected, ExpectedConstant | ExpectedWords | TensorFacts)


def inputs_are_as_they_were(glance: InputGlance, args: object, kwargs: object) -> bool:
    """Whether every input is what it was; if not, that need not be a violation."""
    given: Any = {} if kwargs is None else kwargs
    if type(args) is not tuple or type(given) is not dict or (len(args), tuple(given)) != glance.spelling:
        return False
    try:
        return glance.look((*args, *given.values()))
    except (ArithmeticError, NameError):  # a division by 0, or a size that only a run knows
        return False

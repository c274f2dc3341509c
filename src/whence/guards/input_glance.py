"""One quick look at inputs that are spelled as the example was, tensor by tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence.guards.values import same_constant
from whence.program import Convention
from whence.program.expectations import Constant, TensorFacts
from whence.program.guard_rows import Guard
from whence.schema import GuardKind

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class InputGlance:
    """So many positional inputs, keywords of these names, and what each of them is; nothing is nested."""

    positional: int
    keywords: tuple[str, ...]
    expected: tuple[TensorFacts | Constant, ...]


def input_glance_of(guards: Sequence[Guard], convention: Convention) -> InputGlance | None:
    """What to look at, where a quick look will do: no containers, no aliasing, nothing but plain values."""
    count = len(convention.leaves)
    args, kwargs = convention.unflatten(range(count))
    if [*args, *kwargs.values()] != list(range(count)):
        return None
    if any(guard.kind is GuardKind.ALIASING for guard in guards):
        return None
    expected = [guard.expected for guard in guards if guard.positions]
    found = tuple(row for row in expected if isinstance(row, TensorFacts | Constant))
    return InputGlance(len(args), tuple(kwargs), found) if len(found) == count else None


def inputs_are_as_they_were(glance: InputGlance, args: object, kwargs: object) -> bool:
    """Whether every input is what it was; if not, that need not be a violation."""
    given: Any = {} if kwargs is None else kwargs
    if type(args) is not tuple or type(given) is not dict:
        return False
    if len(args) != glance.positional or tuple(given) != glance.keywords:
        return False
    return all(map(_is, (*args, *given.values()), glance.expected))


def _is(value: Any, expected: TensorFacts | Constant) -> bool:
    if isinstance(expected, Constant):
        return same_constant(expected.value, value)
    return (
        type(value) in _PLAIN
        and value.requires_grad is expected.requires_grad
        and value.layout is expected.layout
        and value.dtype is expected.dtype
        and value.shape == expected.shape
        and value.device == expected.device
        and (expected.strides is None or value.stride() == expected.strides)
    )

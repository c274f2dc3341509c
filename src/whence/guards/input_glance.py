"""One quick look at inputs that are spelled as the example was, tensor by tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whence._torch.tensors import PLAIN_TENSORS
from whence.dependence.tensor_facts import is_like
from whence.dependence.values import same_constant
from whence.program import Convention
from whence.program.arguments.open_sizes import Sizes, at
from whence.program.guards.expectations import ExpectedConstant, ExpectedTensor, ExpectedWords
from whence.program.guards.rows import Guard
from whence.schema import GuardKind

Seen = ExpectedTensor | ExpectedConstant | ExpectedWords


@dataclass(frozen=True)
class InputGlance:
    """So many positional inputs, keywords of these names, and what each of them is; nothing is nested."""

    positional: int
    keywords: tuple[str, ...]
    expected: tuple[Seen, ...]
    sizes: Sizes | None = None


def input_glance_of(guards: Sequence[Guard], convention: Convention) -> InputGlance | None:
    """What to look at, where a quick look will do: no containers, no aliasing, nothing but plain values."""
    count = len(convention.leaves)
    args, kwargs = convention.unflatten(range(count))
    if [*args, *kwargs.values()] != list(range(count)):
        return None
    if any(guard.kind is GuardKind.ALIASING for guard in guards):
        return None
    expected = [guard.expected for guard in guards if guard.positions and guard.kind is GuardKind.INPUT]
    found = tuple(row for row in expected if isinstance(row, Seen))
    if len(found) != count:
        return None
    return InputGlance(len(args), tuple(kwargs), found, convention.sizes)


def inputs_are_as_they_were(glance: InputGlance, args: object, kwargs: object) -> bool:
    """Whether every input is what it was; if not, that need not be a violation."""
    given: Any = {} if kwargs is None else kwargs
    if type(args) is not tuple or type(given) is not dict:
        return False
    if len(args) != glance.positional or tuple(given) != glance.keywords:
        return False
    leaves = (*args, *given.values())
    if glance.sizes is None:
        return all(map(_is, leaves, glance.expected))
    return _fit(glance, glance.sizes, leaves)


def _fit(glance: InputGlance, sizes: Sizes, leaves: Sequence[Any]) -> bool:
    """Whether inputs whose sizes may vary keep all rules."""
    for position, (value, expected) in enumerate(zip(leaves, glance.expected, strict=True)):
        if not isinstance(expected, ExpectedTensor) or not expected.facts.varies:
            if not _is(value, expected):
                return False
        elif not _is_but_size(value, expected) or not sizes.admits(position, value.shape):
            return False
    bound = sizes.bound(leaves)
    if not sizes.all_hold(bound):
        return False
    rows = zip(leaves, glance.expected, strict=True)
    return all(
        value.stride() == tuple(at(size, bound) for size in expected.facts.strides)
        for value, expected in rows
        if isinstance(expected, ExpectedTensor)
        and expected.facts.varies
        and expected.facts.strides is not None
    )


def _is_but_size(value: Any, expected: ExpectedTensor) -> bool:
    given = value.shape if isinstance(value, Tensor) else ()
    return is_like(value, expected.facts._replace(shape=given, strides=None), PLAIN_TENSORS)


def _is(value: Any, expected: Seen) -> bool:
    if isinstance(expected, ExpectedWords):
        return type(value) is int
    if isinstance(expected, ExpectedConstant):
        return same_constant(expected.value, value)
    return is_like(value, expected.facts, PLAIN_TENSORS)

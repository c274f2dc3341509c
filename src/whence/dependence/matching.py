"""Does a value fit what a guard expects? None for yes, and in words what was found for no."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from whence._torch.plain_values import PLAIN, same_constant
from whence._torch.subclasses.fully_sharded import is_distributed_class
from whence._torch.tensors import same_bits
from whence._torch.versions.release import release
from whence.dependence.code import APART, CodePrint
from whence.dependence.describe import (
    HELD_BY_CLASSES,
    closure_of,
    code_of,
    entries_of,
    expected_tensor,
    function_of,
    inside_of_class,
    shown,
)
from whence.dependence.lookup import NOTHING, same_class
from whence.dependence.values import content_of, is_constant, is_solid
from whence.program.arguments.open_sizes import SizeRule
from whence.program.guards.expectations import (
    Entries,
    Expectation,
    ExpectedConstant,
    ExpectedFunction,
    ExpectedHolder,
    ExpectedNames,
    ExpectedTensor,
    ExpectedThing,
    ExpectedWords,
    Hooks,
    Items,
    Missing,
    Reference,
    Snapshot,
)
from whence.program.names import InWords


@dataclass
class Walk:
    """What one check has met so far: which live thing stands for each number of the capture.

    `same_model` says that the captured model itself is checked: only there can objects be the same ones.
    `wrappers` are what was seen through, by the identity of the module inside. `spelled` are names of
    attributes that code may find on tensors and functions, whoever put them there. `things` are containers
    and objects by identity, each with its number, `written` such containers by number: where code writes into
    containers, or compares who they are, it `tells_apart` what holds the same. `waiting` are objects whose
    own attributes are to be checked, and where they were met: `at` is what is being looked at.
    Tensors with numbers in `any_layout` may lie otherwise in memory.
    """

    same_model: bool
    at: str = ""
    spelled: frozenset[str] = frozenset()
    any_layout: frozenset[int] = frozenset()
    holders: dict[int, Any] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    wrappers: dict[int, tuple[nn.Module, ...]] = field(default_factory=dict)
    things: dict[int, tuple[int, object]] = field(default_factory=dict)
    written: dict[int, object] = field(default_factory=dict)
    compared: set[tuple[object, object]] = field(default_factory=set)
    waiting: list[tuple[int, Any, str]] = field(default_factory=list)

    @property
    def tells_apart(self) -> bool:
        """Whether it matters that one thing under two names is one still."""
        return self.same_model and APART in self.spelled


def difference(expected: Expectation, value: Any, walk: Walk) -> str | None:
    """What `value` is, in words, when it is not what was expected."""
    match expected:
        case ExpectedConstant(wanted, number):
            is_same = same_constant(wanted, value) or _is_made_alike(wanted, value)
            return one_with_another(number, value, walk) if is_same else _found_in_words(value)
        case ExpectedTensor():
            return tensor_difference(expected, value, walk)
        case ExpectedHolder(number, kind):
            return _holder_difference(number, kind, value, walk)
        case ExpectedThing(number, kind):
            is_like = same_class(kind, type(value))
            return _one_object(number, value, walk) if is_like else _other_in_words(kind, value)
        case Items(kind, items, number):
            found = _items_difference(kind, items, value, walk)
            return one_with_another(number, value, walk) if found is None else found
        case Entries(number=number):
            found = _entries_difference(expected, value, walk)
            return one_with_another(number, value, walk) if found is None else found
        case Snapshot(kind, content, number):
            is_same = type(value) is kind and content_of(value) == content
            return one_with_another(number, value, walk) if is_same else _found_in_words(value)
        case ExpectedFunction():
            return None if _is_function(expected, value, walk) else _other_function(expected, value, walk)
        case Reference(target, kind):
            return None if _is_same_object(target(), kind, value, walk) else _other_in_words(kind, value)
        case Hooks() | ExpectedNames() | ExpectedWords() | Missing() | SizeRule():
            return _found_in_words(value)


def _is_made_alike(wanted: object, value: object) -> bool:
    """Whether two classes were made by the same code around equal values."""
    return isinstance(wanted, type) and isinstance(value, type) and same_class(wanted, value)


def one_with_another(number: int, value: object, walk: Walk) -> str | None:
    """Whether a thing stands for another of the capture, too, so that what is written there is read here."""
    if number < 0:
        return None
    known, _ = walk.things.setdefault(id(value), (number, value))
    if known != number:
        return "one thing with another"
    is_alone = walk.tells_apart and walk.written.setdefault(number, value) is not value
    return f"a {type(value).__name__} of its own" if is_alone else None


def _one_object(number: int, value: object, walk: Walk) -> str | None:
    """The same of an object, of which each place may have its own: what is written there is seen."""
    known, _ = walk.things.setdefault(id(value), (number, value))
    return None if known == number else "one thing with another"


def tensor_difference(expected: ExpectedTensor, value: Any, walk: Walk) -> str | None:
    """How a tensor differs in anything but its numbers, or in which other tensor it is."""
    if not isinstance(value, Tensor):
        return _found_in_words(value)
    found = expected_tensor(value, expected.number)
    is_free = expected.facts.strides is None or expected.number in walk.any_layout
    if is_free or _same_strides(expected, found) or _is_copied(expected, found):
        found = found.with_strides(expected.facts.strides)
    if _is_managed(expected):
        found = found.as_one()
    if not _same_tensor_class(expected, value) or found.but_type() != expected.but_type():
        return str(expected_tensor(value))
    if expected.target is not None and not _is_that_constant(expected.target(), value, walk):
        return f"another {expected_tensor(value)}"
    if (other := _other_attribute(expected.attributes, vars(value), walk)) is not None:
        return f"one {other}"
    return _tie_difference(expected.number, value, walk)


def _other_attribute(
    expected: Sequence[tuple[str, Expectation]], held: dict[str, Any], walk: Walk
) -> str | None:
    """What somebody has put on a tensor or a function since, or taken from it."""
    for name, wanted in expected:
        if _is_put_by_step(wanted):
            continue
        if (other := found_in_place(wanted, held.get(name, NOTHING), walk)) is not None:
            return f"whose {name} is {other}"
    more = walk.spelled.intersection(held) if held else frozenset()
    new = min(more.difference(name for name, _ in expected), default=None)
    return None if new is None else f"whose {new} is {_found_in_words(held[new])}"


def _is_put_by_step(expected: Expectation) -> bool:
    """Whether a step looks itself at what is in a place."""
    return isinstance(expected, ExpectedWords)


def found_in_place(expected: Expectation, value: Any, walk: Walk) -> str | None:
    """What a lookup found, or that it found `NOTHING`, where that is not what was expected."""
    if isinstance(expected, Missing):
        return None if value is NOTHING else _found_in_words(value)
    return "absent" if value is NOTHING else difference(expected, value, walk)


def _is_copied(expected: ExpectedTensor, found: ExpectedTensor) -> bool:
    """Whether a tensor lies as a copy of what was there does, which has no gaps."""
    return expected.copied is not None and _same_strides(expected.with_strides(expected.copied), found)


def _same_tensor_class(expected: ExpectedTensor, value: Tensor) -> bool:
    """Where FSDP managed a parameter, the whole may be there or never have been sharded."""
    if _is_managed(expected) and type(value) is nn.Parameter:
        return True
    return same_class(expected.facts.type, type(value))


def _is_managed(expected: ExpectedTensor) -> bool:
    """Whether FSDP managed a parameter: a DTensor of one's own is described with what it is made of."""
    return is_distributed_class(expected.facts.type) and expected.composition is None


def _is_that_constant(target: object, value: Tensor, walk: Walk) -> bool:
    """A tensor that the program has as a constant: the same one; on another model one of the same numbers."""
    if target is value:
        return True
    if walk.same_model or not isinstance(target, Tensor) or target.is_meta:
        return False
    return same_bits(target, value)


def _same_strides(expected: ExpectedTensor, found: ExpectedTensor) -> bool:
    """Where a dimension has one element or none, its stride means nothing."""
    wanted, now = expected.facts, found.facts
    if wanted.shape != now.shape or now.strides is None or wanted.strides is None:
        return False
    rows = zip(wanted.shape, wanted.strides, now.strides, strict=True)
    return all(left == right for size, left, right in rows if not isinstance(size, int) or size > 1)


def _tie_difference(number: int, value: Tensor, walk: Walk) -> str | None:
    if number < 0:
        return None
    if walk.tensors.setdefault(number, value) is not value:
        return "a tensor of its own"
    if walk.numbers.setdefault(id(value), number) != number:
        return "one tensor with another"
    return None


def _holder_difference(number: int, kind: type, value: Any, walk: Walk) -> str | None:
    if not same_class(kind, type(value)):
        return _other_in_words(kind, value)
    known = walk.holders.setdefault(number, value)
    if isinstance(value, nn.Module):
        if known is not value:
            return f"a {type(value).__name__} of its own"
    elif (found := _one_object(number, value, walk)) is not None:
        return found
    walk.waiting.append((number, value, walk.at))
    return None


def _items_difference(kind: type, items: Sequence[Expectation], value: Any, walk: Walk) -> str | None:
    if type(value) is kind and isinstance(value, HELD_BY_CLASSES):
        return None if difference(items[0], inside_of_class(value), walk) is None else _found_in_words(value)
    if type(value) is not kind or not isinstance(value, list | tuple | deque | weakref.ref):
        return _found_in_words(value)
    held = [] if isinstance(value, weakref.ref) else list(iter(value))  # its class may have no length
    if len(held) != len(items):
        return _found_in_words(value)
    return _first_difference(items, held, [f"[{position}]" for position in range(len(items))], walk)


def _entries_difference(expected: Entries, value: Any, walk: Walk) -> str | None:
    held, keys, things = entries_of(value), expected.keys, iter(expected.things)
    if held is not None and expected.put:
        held = {key: item for key, item in held.items() if key not in expected.put}
    if held is None or type(value) is not expected.type or len(held) != len(keys):
        return _found_in_words(value)
    wanted = (next(things) if isinstance(key, InWords) else key for key in keys)
    if not all(_is_same_key(key, found, walk) for key, found in zip(wanted, held, strict=True)):
        return _found_in_words(value)
    return _first_difference(expected.items, list(held.values()), [f"[{key!r}]" for key in keys], walk)


def _is_same_key(expected: object, key: object, walk: Walk) -> bool:
    if isinstance(expected, Reference):
        return _is_same_object(expected.target(), expected.type, key, walk)
    if is_constant(expected):
        return same_constant(expected, key)
    return is_solid(key) and expected == key


def _first_difference(
    expected: Sequence[Expectation], values: Sequence[Any], places: Sequence[str], walk: Walk
) -> str | None:
    if (key := (tuple(map(id, expected)), tuple(map(id, values)))) in walk.compared:
        return None  # containers that lead back to themselves
    walk.compared.add(key)
    at = walk.at
    for wanted, value, place in zip(expected, values, places, strict=True):
        walk.at = f"{at}{place}"
        found = None if _is_put_by_step(wanted) else difference(wanted, value, walk)
        if found is not None:
            return f"one whose item {place} is {found}"
    return None


def _is_function(expected: ExpectedFunction, value: Any, walk: Walk) -> bool:
    function = function_of(value)
    if function is None or not _is_same_function(expected, function[0], walk):
        return False
    if is_marked(expected, function[0]) and _other_mark(expected, function[0], walk) is not None:
        return False
    _, owner, fixed = function
    return _is_bound_alike(expected, owner, walk) and _fixes_the_same(expected, fixed, walk)


def is_marked(expected: ExpectedFunction, function: Any) -> bool:
    """Whether somebody has put attributes on a function, then or since."""
    return bool(expected.attributes or (isinstance(function, types.FunctionType) and function.__dict__))


def _other_mark(expected: ExpectedFunction, function: Any, walk: Walk) -> str | None:
    held = vars(function) if isinstance(function, types.FunctionType) else {}
    return _other_attribute(expected.attributes, held, walk)


def _is_bound_alike(expected: ExpectedFunction, owner: object, walk: Walk) -> bool:
    if expected.owner is None:
        return owner is None
    if expected.bound is not None:
        return _holder_difference(expected.bound, expected.owner, owner, walk) is None
    return same_class(expected.owner, type(owner))


def _is_same_function(expected: ExpectedFunction, value: Any, walk: Walk) -> bool:
    """One object, or two made by the same line of code around equal values."""
    if value is expected.target:
        return expected.code is None or code_of(value) == expected.code
    if expected.code is None or code_of(value) != expected.code:
        return False
    closure = closure_of(value)
    return len(closure) == len(expected.closure) and all(
        difference(item, found, walk) is None for item, found in zip(expected.closure, closure, strict=True)
    )


def _fixes_the_same(expected: ExpectedFunction, fixed: "functools.partial[Any] | None", walk: Walk) -> bool:
    if fixed is None:
        return not expected.arguments and not expected.keywords
    if len(fixed.args) != len(expected.arguments) or list(fixed.keywords) != [
        k for k, _ in expected.keywords
    ]:
        return False
    wanted = [*expected.arguments, *(item for _, item in expected.keywords)]
    pairs = zip(wanted, [*fixed.args, *fixed.keywords.values()], strict=True)
    return all(difference(item, value, walk) is None for item, value in pairs)


def _is_same_object(target: object, kind: type, value: Any, walk: Walk) -> bool:
    """The same object on the captured model; on another one, which has objects of its own, the same class."""
    if target is not None and value is target:
        return True
    return not walk.same_model and same_class(kind, type(value))


def _other_in_words(kind: type, value: Any) -> str:
    name = type(value).__name__
    if type(value) in PLAIN:
        return repr(value)
    return f"another {name}" if same_class(kind, type(value)) or name == kind.__name__ else name


def _other_function(expected: ExpectedFunction, value: Any, walk: Walk) -> str:
    """A function in words; where they are those of the one expected, what else it is."""
    found, code = _found_in_words(value), expected.code
    function = function_of(value)
    if found != str(expected) or function is None:
        return found
    if code is None or code == code_of(function[0]):
        other = _other_mark(expected, function[0], walk)
        return f"another {found}" if other is None else f"one {other}"
    then = code.release if isinstance(code, CodePrint) else release()
    releases = f" (captured with PyTorch {then}, this is {release()})" if then != release() else ""
    return f"{found} with other code{releases}"


def _found_in_words(value: Any) -> str:
    """A found value in words, without running code of its own."""
    return type(value).__name__ if isinstance(value, nn.Module) else shown(value)

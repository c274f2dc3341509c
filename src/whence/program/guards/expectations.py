"""What a guard expects to find: descriptions of Python values that outlive the values.

Each kind of description is a row; `dependence/describe.py` writes them, and `dependence/matching.py` compares
them.
"""

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional

from whence._torch.plain_values import TEXTS_AND_NUMBERS
from whence._torch.subclasses.wrapper_subclasses import Composition
from whence.program.arguments.open_sizes import Sized, SizeRule

_SHOWN_ITEMS = 6
_WIDTH = 80
_TRUSTED = ("builtins", "torch", "re", "decimal", "fractions", "datetime", "uuid", "pathlib", "numpy")
_BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), weakref.ref: ("a weak reference to ", "")}


@dataclass(frozen=True, slots=True)
class ExpectedConstant:
    """A value that equality decides, together with its type: numbers, text, flags, dtypes, devices.

    A set can be written, and has a `number` as containers have.
    """

    value: Any
    number: int = field(default=-1, compare=False)

    def __str__(self) -> str:
        return _constant_shown(self.value)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An array of Python's or NumPy's, or a mesh of processes, compared by what it holds, with its number."""

    type: type
    content: object
    number: int = field(default=-1, compare=False)

    def __str__(self) -> str:
        return f"{self.type.__name__} {str(self.content)[:_WIDTH]}"


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that cannot be compared by value. `target` gives the object, or None when it is gone."""

    target: Callable[[], object]
    type: type
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ExpectedFunction:
    """A function, found behind bound methods and `functools.partial`.

    `owner` is the class whose instance a bound method belongs to, and `bound` the number of that instance
    where it has one; `arguments` and `keywords` what a partial fixes; `code` what the function runs, which
    can be exchanged. `closure` is what a function that was made inside another one keeps of it: two functions
    of one code with the same closure are the same. `attributes` are those that somebody put on the function,
    and code reads.
    """

    target: Any
    owner: type | None = None
    arguments: tuple["Expectation", ...] = ()
    keywords: tuple[tuple[str, "Expectation"], ...] = ()
    closure: tuple["Expectation", ...] = ()
    bound: int | None = None
    code: object = None
    attributes: tuple[tuple[str, "Expectation"], ...] = ()

    def __str__(self) -> str:
        name = _function_in_words(self.target)
        fixed = [*map(str, self.arguments), *(f"{key}={value}" for key, value in self.keywords)]
        return f"partial({', '.join([name, *fixed])})" if fixed else name


@dataclass(frozen=True, slots=True)
class Items:
    """A list, tuple, deque, weak reference, property or method of a class, and what it holds.

    `number` tells those that can be written apart from others that hold the same.
    """

    type: type
    items: tuple["Expectation", ...]
    number: int = field(default=-1, compare=False)

    def __str__(self) -> str:
        return _listed(self.type, [_brief(item) for item in self.items])


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping: its keys in order and what it holds, with its number.

    Keys that are objects are `things`, in order; where they are is said in words. What is under the keys that
    a step has `put` there is its own.
    """

    type: type
    keys: tuple[Any, ...]
    items: tuple["Expectation", ...]
    number: int = field(default=-1, compare=False)
    things: tuple[Reference, ...] = ()
    put: tuple[Any, ...] = ()

    def __str__(self) -> str:
        rows = zip(self.keys, self.items, strict=True)
        pairs = [f"{_constant_shown(key)}: {_brief(item)}" for key, item in rows]
        return _listed(self.type, pairs)


class TensorFacts(NamedTuple):
    """What operations ask of a tensor, apart from its numbers.

    A tensor without strides has None; a nested or uninitialised one has no shape to speak of.
    """

    type: type
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    strides: tuple[Any, ...] | None
    requires_grad: bool

    @property
    def varies(self) -> bool:
        """Whether some of its sizes may vary."""
        return any(isinstance(size, str) for size in self.shape)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        words = [f"{self.type.__name__} {dtype}[{', '.join(map(str, self.shape))}]"]
        words += [str(self.layout).removeprefix("torch.")] if self.layout is not torch.strided else []
        words += [f"on {self.device}"] if self.device.type != "cpu" else []
        plain = self.varies or self.strides in (None, _plain_strides(self.shape))
        words += [] if plain else [f"strides {self.strides}"]
        return ", ".join(words + (["requires grad"] if self.requires_grad else []))


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of which everything but its numbers is expected.

    `number` tells tensors of one capture apart. `target` gives the tensor itself where no other will do: the
    program has it as a constant, and nobody could name another in its place. Of a tensor that is made of
    others, `composition` is how, and `parts` are those. `copied` are the strides that a copy has, where they
    differ and will do. `attributes` are those that code put on the tensor, and reads.
    """

    facts: TensorFacts
    number: int = -1
    target: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    composition: Composition | None = None
    parts: tuple["ExpectedTensor", ...] = ()
    copied: tuple[Sized, ...] | None = None
    attributes: tuple[tuple[str, "Expectation"], ...] = ()

    def with_strides(self, strides: tuple[Sized, ...] | None) -> "ExpectedTensor":
        """The same in another layout, or (None) in any."""
        return replace(self, facts=self.facts._replace(strides=strides))

    def as_one(self) -> "ExpectedTensor":
        """The same, however the tensor is made of others: FSDP gathers what it manages."""
        return replace(self, composition=None, parts=())

    def but_type(self) -> tuple[object, ...]:
        """Everything that equality decides."""
        return self.facts[1:], self.composition, tuple(part.but_type() for part in self.parts)

    def __str__(self) -> str:
        words = [str(self.facts), *(f"with {name} {held}" for name, held in self.attributes)]
        if self.composition is not None:
            rows = zip(self.composition.names, self.parts, strict=True)
            words += [f"made of {' and '.join(f'{name} ({part})' for name, part in rows)}"]
            words += [] if self.composition.context is None else [f"with {self.composition.context}"]
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class ExpectedHolder:
    """A module or another object whose own attributes are guarded: the number of the holder."""

    number: int
    type: type

    def __str__(self) -> str:
        return self.type.__name__


@dataclass(frozen=True, slots=True)
class ExpectedThing:
    """An object that other guards look into: any of its class, but none that has another `number`, too."""

    number: int
    type: type

    def __str__(self) -> str:
        return f"a {self.type.__name__}"


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a module, or of the process: the kind of each and its function, in the order they run."""

    rows: tuple[tuple[str, "Expectation"], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{kind} {function}" for kind, function in self.rows) or "none"


@dataclass(frozen=True, slots=True)
class ExpectedNames:
    """What a module holds, by name and in order."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return _first_of(self.names) or "none"


@dataclass(frozen=True, slots=True)
class ExpectedWords:
    """Something that is checked by a rule of its own, said in words."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing: the attribute was looked for and was not there."""

    def __str__(self) -> str:
        return "absent"


Expectation = (
    ExpectedConstant
    | Snapshot
    | Reference
    | ExpectedFunction
    | Items
    | Entries
    | ExpectedTensor
    | ExpectedHolder
    | ExpectedThing
    | Hooks
    | ExpectedNames
    | ExpectedWords
    | Missing
    | SizeRule
)


def inside_of(expected: Expectation) -> tuple[Expectation, ...]:
    """What an expectation holds of others."""
    match expected:
        case Items(_, items) | Entries(_, _, items):
            return items
        case ExpectedFunction():
            named = (*expected.keywords, *expected.attributes)
            return *expected.arguments, *(item for _, item in named), *expected.closure
        case Hooks(rows):
            return tuple(function for _, function in rows)
    return ()


def _constant_shown(value: Any) -> str:
    """A constant in words, by no code of the user's."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    base = next((base for base in TEXTS_AND_NUMBERS if isinstance(value, base)), None)
    if base is not None:
        return str(base.__repr__(value))
    if isinstance(value, set | frozenset) and value:  # which has an order of its own in every process
        items = f"{{{', '.join(sorted(map(_constant_shown, value)))}}}"
        return items if type(value) is set else f"{type(value).__name__}({items})"
    return repr(value) if type(value).__module__ in _TRUSTED else type(value).__name__


def _brief(item: "Expectation") -> str:
    """An item of a container: of a container inside it only what it is, or a page would not do."""
    if isinstance(item, Items | Entries) and any(isinstance(inner, Items | Entries) for inner in item.items):
        return f"{item.type.__name__} of {len(item.items)}"
    return str(item)


def _function_in_words(function: Any) -> str:
    """A function as people write it: `torch.tanh`, or the name it was defined under."""
    name = getattr(function, "__name__", "")
    for module in (torch, torch.nn.functional):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    return getattr(function, "__qualname__", None) or repr(function)


def _first_of(shown: Sequence[str]) -> str:
    more = [f"… {len(shown)} in all"] if len(shown) > _SHOWN_ITEMS else []
    return ", ".join([*shown[:_SHOWN_ITEMS], *more])


def _listed(kind: type, shown: list[str]) -> str:
    text = _first_of(shown)
    if kind is tuple and len(shown) == 1:
        return f"({text},)"
    opening, closing = _BRACKETS.get(kind, (f"{kind.__name__}(", ")"))
    return f"{opening}{text}{closing}"


def _plain_strides(shape: tuple[Sized, ...]) -> tuple[int, ...]:
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(int(size), 1))
    return tuple(reversed(steps)) if shape else ()

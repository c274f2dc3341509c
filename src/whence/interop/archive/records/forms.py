"""What the fields of a program's records are made of, read off their annotations, for writer and reader.

A record is stored field by field, and what a field may hold is what its annotation says. So neither side
lists fields, and nothing can be read that a field may not hold.
"""

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from whence._torch.pytrees import TreeSpec
from whence.errors import UnsupportedGraph
from whence.program import Absent, Constant, Convention, Named, Whole
from whence.program.arguments.host_state import HostCall, HostPlace
from whence.program.arguments.open_sizes import Reading, SizeRule, Sizes
from whence.program.arguments.optimizer_arguments import Outside, Step
from whence.program.guards.expectations import ExpectedFunction, ExpectedTensor, Reference, TensorFacts
from whence.program.guards.guards import Guards
from whence.program.program import Circumstances
from whence.program.replay import Replays
from whence.provenance import CallSite, ModulePath, Source


@dataclass(frozen=True)
class Atom:
    """One of these types, stored as itself."""

    kinds: tuple[type, ...]


@dataclass(frozen=True)
class Special:
    """What has a way of its own to be stored, by name."""

    name: str


@dataclass(frozen=True)
class Row:
    """A row of things of one form: a tuple, or a frozen set."""

    of: "Form"
    kind: type


@dataclass(frozen=True)
class Fixed:
    """A tuple of so many things, each of its own form."""

    items: tuple["Form", ...]


@dataclass(frozen=True)
class Table:
    """A mapping."""

    key: "Form"
    value: "Form"


@dataclass(frozen=True)
class Choice:
    """One of several forms; `empty` where it may be None."""

    options: tuple["Form", ...]
    empty: bool


@dataclass(frozen=True)
class Field:
    """One field of a record: its name, its form, and how it is left out."""

    name: str
    form: "Form"
    default: Any = MISSING


@dataclass(frozen=True)
class Record:
    """A frozen dataclass or a named tuple."""

    kind: type

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Its fields in order; found when they are asked for, for records hold records of their own kind."""
        hints = get_type_hints(self.kind)
        found = _defaults(self.kind)
        return tuple(
            Field(name, SPECIAL.get((self.kind, name)) or form_of(hints[name]), default)
            for name, default in found.items()
        )


Form = Atom | Special | Row | Fixed | Table | Choice | Record
ANYTHING, SIZED, FUNCTION = Special("anything"), Special("sized"), Special("function")

SPECIAL: dict[tuple[type, str], Form] = {
    (Circumstances, "loss_function"): FUNCTION,
    (Convention, "adapter"): Special("adapter"),
    (Guards, "of"): Special("nothing"),
    (Replays, "known"): Special("nothing"),
    (Whole, "tensor"): Special("nothing"),
    (Step, "call"): FUNCTION,
    (Step, "optimizer"): Special("of class"),
    (Step, "graph"): Special("nothing"),
    (Outside, "root"): Special("root"),
    (HostPlace, "holder"): Special("root"),
    (HostCall, "schedule"): Special("root"),
    (Outside, "way"): Special("way"),
    (Outside, "value"): Special("outside"),
    (Reference, "target"): Special("reference"),
    (ExpectedFunction, "target"): Special("target"),
    (ExpectedFunction, "code"): Special("code"),
    (ExpectedTensor, "target"): Special("constant"),
    (ExpectedTensor, "copied"): Choice((Row(SIZED, tuple),), True),
    (TensorFacts, "shape"): Row(SIZED, tuple),
    (TensorFacts, "strides"): Choice((Row(SIZED, tuple),), True),
    (SizeRule, "condition"): SIZED,
    (Sizes, "shapes"): Row(Choice((Row(SIZED, tuple),), True), tuple),
    (Reading, "name"): Special("identifier"),
}
"""Fields whose annotation does not say how they are stored."""

_BY_TYPE: dict[Any, Form] = {
    Any: ANYTHING,
    object: ANYTHING,
    ModulePath: Special("path"),
    Source: Special("line"),
    CallSite: Special("site"),
    TreeSpec: Special("structure"),
    type: Special("class"),
    inspect.Signature: Special("parameters"),
    Tensor: ANYTHING,
    torch.dtype: ANYTHING,
    torch.device: ANYTHING,
    torch.layout: ANYTHING,
}


@cache
def form_of(hint: Any) -> Form:
    """The form of what an annotation allows."""
    if hint in _BY_TYPE:
        return _BY_TYPE[hint]
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _choice(inside)
    if origin is tuple and inside[-1:] != (...,):
        return Fixed(tuple(map(form_of, inside)))
    if origin in (tuple, frozenset):
        return Row(form_of(inside[0]), origin)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Table(form_of(inside[0]), form_of(inside[1]))
    if hint in (bool, int, float, str):
        return Atom((hint,))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Special(hint.__name__)
    if is_record(hint):
        return Record(hint)
    raise UnsupportedGraph(f"whence does not say how {hint} is stored")


def _choice(inside: tuple[Any, ...]) -> Form:
    if frozenset(inside) == {Named, Constant, Absent}:
        return Special("leaf")
    options = tuple(form_of(each) for each in inside if each is not type(None))
    atoms = tuple(kind for each in options if isinstance(each, Atom) for kind in each.kinds)
    others = tuple(each for each in options if not isinstance(each, Atom))
    return Choice((*others, *([Atom(atoms)] if atoms else [])), type(None) in inside)


def is_record(hint: Any) -> bool:
    """Whether a class is stored field by field."""
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_field_defaults"))


def _defaults(kind: Any) -> dict[str, Any]:
    """The fields of a record, and what each is where it is left out."""
    if not is_dataclass(kind):
        return {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}
    found = {}
    for row in fields(kind):
        made = row.default_factory
        found[row.name] = row.default if made is MISSING else made()
    return found

"""What the fields of a program's records are made of, read off their annotations; each form writes and reads.

A record is stored field by field, and what a field may hold is what its annotation says. So nobody lists
fields, and nothing can be read that a field may not hold.
"""

import inspect
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from whence._torch.pytrees import TreeSpec
from whence._torch.subclasses.wrapper_subclasses import Composition
from whence.errors import UnsupportedGraph
from whence.interop.archive.records import kinds
from whence.interop.archive.records.checked import (
    Unreadable,
    atom,
    column,
    expanded,
    listed,
    mapping,
    number,
    raise_unless,
)
from whence.interop.archive.records.kinds import Special
from whence.interop.archive.records.values import written_value
from whence.program import Absent, Constant, Convention, Named, Signature, Whole
from whence.program.arguments.host_state import HostCall, HostPlace, Owner
from whence.program.arguments.open_sizes import Reading, SizeRule, Sizes
from whence.program.arguments.optimizer_arguments import Outside, Step
from whence.program.guards.expectations import ExpectedFunction, ExpectedTensor, Reference, TensorFacts
from whence.program.guards.guards import Guards
from whence.program.node_records import Contribution
from whence.program.program import Circumstances
from whence.program.queries.history import History, PassEntry
from whence.program.replay import Replays
from whence.provenance import CallSite, ModulePath, Origin, Source

if TYPE_CHECKING:
    from whence.interop.archive.records.reading import Reader
    from whence.interop.archive.records.writing import Writer


@dataclass(frozen=True)
class Atom:
    """One of these types, stored as itself."""

    kinds: tuple[type, ...]

    def write(self, writer: "Writer", value: Any) -> Any:
        return written_value(writer, value) if type(value) is float else value

    def read(self, _reader: "Reader", data: Any) -> Any:
        return atom(self.kinds, data)


@dataclass(frozen=True)
class Row:
    """A row of things of one form: a tuple, or a frozen set; rows of records are stored as columns."""

    of: "Form"
    kind: type

    @property
    def _records(self) -> "Record | None":
        return self.of if isinstance(self.of, Record) and issubclass(self.kind, tuple) else None

    def write(self, writer: "Writer", value: Any) -> Any:
        if self._records is not None:
            return self._records.write_all(writer, value)
        written = [self.of.write(writer, each) for each in value]
        return sorted(written) if self.kind is frozenset else written

    def read(self, reader: "Reader", data: Any) -> Any:
        if self._records is not None:
            return self.kind(self._records.read_all(reader, data))
        return self.kind(self.of.read(reader, each) for each in listed(data))


@dataclass(frozen=True)
class Fixed:
    """A tuple of so many things, each of its own form."""

    items: tuple["Form", ...]

    def write(self, writer: "Writer", value: Any) -> Any:
        return [of.write(writer, each) for of, each in zip(self.items, value, strict=True)]

    def read(self, reader: "Reader", data: Any) -> Any:
        return tuple(of.read(reader, each) for of, each in zip(self.items, listed(data), strict=True))


@dataclass(frozen=True)
class Table:
    """A mapping."""

    key: "Form"
    value: "Form"

    def write(self, writer: "Writer", value: Any) -> Any:
        return [[self.key.write(writer, key), self.value.write(writer, held)] for key, held in value.items()]

    def read(self, reader: "Reader", data: Any) -> Any:
        return {self.key.read(reader, key): self.value.read(reader, held) for key, held in listed(data)}


@dataclass(frozen=True)
class Choice:
    """One of several forms; `empty` where it may be None. Of several records each says which it is."""

    options: tuple["Form", ...]
    empty: bool

    @cached_property
    def _by_name(self) -> "dict[str, Record]":
        return {option.kind.__name__: option for option in self.options if isinstance(option, Record)}

    @cached_property
    def _others(self) -> "list[Form]":
        """What is no record, an atom first where nothing else says so."""
        others = [option for option in self.options if not isinstance(option, Record)]
        return sorted(others, key=lambda option: not isinstance(option, Atom))

    def write(self, writer: "Writer", value: Any) -> Any:
        if value is None:
            return None
        name = type(value).__name__
        found = self._by_name.get(name)
        if found is not None and found.kind is type(value):
            written = found.write(writer, value)
            return written if len(self.options) == 1 else {name: written}
        fits = (each for each in self._others if not isinstance(each, Atom) or type(value) in each.kinds)
        return next(fits).write(writer, value)

    def read(self, reader: "Reader", data: Any) -> Any:
        if data is None:
            raise_unless(self.empty, "something is missing")
            return None
        if len(self.options) == 1:
            return self.options[0].read(reader, data)
        if isinstance(data, dict) and len(data) == 1 and (name := next(iter(data))) in self._by_name:
            return self._by_name[name].read(reader, data[name])
        if not self._others:
            raise Unreadable(f"it is none of {', '.join(self._by_name)}")
        return self._others[0].read(reader, data)


@dataclass(frozen=True)
class Field:
    """One field of a record: its name, its form, and how it is left out."""

    name: str
    form: "Form"
    default: Any = MISSING

    @property
    def left_out(self) -> Any:
        """What it is where it is left out; `Unreadable` for one that must be there."""
        if self.default is MISSING:
            raise Unreadable(f"{self.name} is missing")
        return self.default

    def is_default(self, value: Any) -> bool:
        """Whether it may be left out."""
        default = self.default
        if self.form is kinds.NOWHERE and default is None:
            return True
        if default is MISSING or type(value) is not type(default):
            return False
        if isinstance(default, tuple | frozenset | Mapping):
            return not default and not value
        return value is default or (type(value) in (bool, int, str) and value == default)


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

    def write(self, writer: "Writer", value: Any) -> dict[str, Any]:
        """The fields, but for those that are as they are where nobody says otherwise."""
        return {
            row.name: row.form.write(writer, held)
            for row in self.fields
            if not row.is_default(held := getattr(value, row.name))
        }

    def read(self, reader: "Reader", data: Any) -> Any:
        """The record of its fields."""
        given = mapping(data)
        self._refuse_unknown(given)
        values = {
            row.name: row.form.read(reader, given[row.name]) if row.name in given else row.left_out
            for row in self.fields
        }
        return self._made(reader, values)

    def write_all(self, writer: "Writer", values: Iterable[Any]) -> dict[str, Any]:
        """Several as columns, of which those are left out that say nothing."""
        rows = list(values)
        columns: dict[str, Any] = {}
        for row in self.fields:
            held = [getattr(value, row.name) for value in rows]
            if not all(map(row.is_default, held)):
                columns[row.name] = column([row.form.write(writer, each) for each in held])
        return {"count": len(rows), "columns": columns}

    def read_all(self, reader: "Reader", data: Any) -> tuple[Any, ...]:
        """Several of their columns."""
        given = mapping(data)
        count, columns = number(given["count"]), mapping(given["columns"])
        if not columns:
            raise_unless(count == 0, "there are rows without columns")
            return ()
        self._refuse_unknown(columns)
        read = {row.name: partial(row.form.read, reader) for row in self.fields}
        given_columns = {name: expanded(held, read[name]) for name, held in columns.items()}
        for name, held in given_columns.items():  # before others are made as long as the file says
            raise_unless(len(held) == count, f"the column {name} is not as long as others")
        found = {row.name: given_columns.get(row.name) or [row.left_out] * count for row in self.fields}
        rows = zip(*found.values(), strict=True)
        return tuple(self._made(reader, dict(zip(found, row, strict=True))) for row in rows)

    def _refuse_unknown(self, given: Mapping[str, Any]) -> None:
        if unknown := given.keys() - {row.name for row in self.fields}:
            raise Unreadable(f"{self.kind.__name__} has no {', '.join(unknown)}")

    def _made(self, reader: "Reader", values: dict[str, Any]) -> Any:
        return self.kind(**(reader.found.resolved(self.kind, values) if "target" in values else values))


@dataclass(frozen=True)
class Listed:
    """A record as a list of its fields; those behind the first `always` are there together, or not at all."""

    kind: type
    always: int

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        return Record(self.kind).fields

    def write(self, writer: "Writer", value: Any) -> list[Any]:
        """What is in the fields."""
        held = [(row, getattr(value, row.name)) for row in self._fields]
        if all(row.is_default(each) for row, each in held[self.always :]):
            held = held[: self.always]
        return [row.form.write(writer, each) for row, each in held]

    def read(self, reader: "Reader", data: Any) -> Any:
        """The record again."""
        given = listed(data)
        raise_unless(len(given) in (self.always, len(self._fields)), "a row has other parts")
        pairs = zip(self._fields, given, strict=False)
        return self.kind(*(row.form.read(reader, each) for row, each in pairs))


Form = Atom | Special | Row | Fixed | Table | Choice | Record
_LIMIT = Choice((Atom((int,)),), True)
_SIZES, _NAME = Row(kinds.SIZED, tuple), Choice((kinds.NODE_NAME,), True)

SPECIAL: dict[tuple[type, str], Form] = {
    (Circumstances, "loss_function"): kinds.FUNCTION,
    (Circumstances, "unread"): kinds.NOWHERE,
    (Convention, "adapter"): kinds.ADAPTER,
    (Convention, "limits"): Table(kinds.SYMBOL, Fixed((_LIMIT, _LIMIT))),
    (Guards, "of"): kinds.NOWHERE,
    (Replays, "known"): kinds.NOWHERE,
    (Whole, "tensor"): kinds.NOWHERE,
    (Step, "call"): kinds.FUNCTION,
    (Step, "optimizer"): kinds.OF_CLASS,
    (Step, "graph"): kinds.NOWHERE,
    (Step, "actors"): kinds.NOWHERE,
    (Outside, "root"): kinds.ROOT,
    (HostPlace, "holder"): kinds.ROOT,
    (Owner, "thing"): kinds.ROOT,
    (HostCall, "schedule"): kinds.ROOT,
    (Outside, "way"): kinds.WAY,
    (Outside, "value"): kinds.OUTSIDE,
    (Reference, "target"): kinds.REFERENCE,
    (ExpectedFunction, "target"): kinds.TARGET,
    (ExpectedFunction, "code"): kinds.CODE,
    (ExpectedTensor, "target"): kinds.CONSTANT,
    (ExpectedTensor, "copied"): Choice((_SIZES,), True),
    (TensorFacts, "shape"): _SIZES,
    (TensorFacts, "strides"): Choice((_SIZES,), True),
    (SizeRule, "condition"): kinds.CONDITION,
    (Sizes, "shapes"): Row(Choice((_SIZES,), True), tuple),
    (Reading, "name"): kinds.IDENTIFIER,
    (Origin, "forward"): _NAME,
    (Contribution, "node"): kinds.NODE_NAME,
    (Contribution, "sum"): _NAME,
}
"""Fields whose annotation does not say how they are stored."""

_FOLLOW = frozenset(((Signature, "graph_module"), (Guards, "said")))
"""Fields that the program fills of itself."""

_BY_TYPE: dict[Any, Form] = {
    **dict.fromkeys((Any, object, Tensor), kinds.ANYTHING),
    **{kind: kinds.one_of_torch(kind) for kind in (torch.dtype, torch.device, torch.layout)},
    ModulePath: kinds.PATH,
    Source: kinds.LINE,
    CallSite: kinds.SITE,
    Composition: kinds.COMPOSITION,
    TreeSpec: kinds.STRUCTURE,
    History: Row(Record(PassEntry), History),
    type: kinds.CLASS,
    inspect.Signature: kinds.PARAMETERS,
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
        return kinds.enumerated(hint)
    if is_record(hint):
        return Record(hint)
    raise UnsupportedGraph(f"whence does not say how {hint} is stored")


def _choice(inside: tuple[Any, ...]) -> Form:
    if frozenset(inside) == {Named, Constant, Absent}:
        return kinds.LEAF
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
    for row in (row for row in fields(kind) if (kind, row.name) not in _FOLLOW):
        made = row.default_factory
        found[row.name] = row.default if made is MISSING else made()
    return found


POOLS: Mapping[str, Special | Listed] = {
    "paths": kinds.PATHS,
    "lines": Listed(Source, 3),
    "sites": Listed(CallSite, 3),
    "classes": kinds.CLASSES,
    "tensors": kinds.TENSORS,
    "structures": kinds.STRUCTURES,
}
"""In the order in which they are read: each may name what is before it."""

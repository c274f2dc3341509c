"""A program's records become plain data; `reading.py` is its mirror, case by case.

Whatever cannot be stored is noted, and named all at once when everything has been gone through.
"""

import base64
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import TreeSpec
from whence._torch.sizes.dims import dim_in_words
from whence._torch.sizes.numbers import Unknown
from whence._torch.sizes.structure import SizeStructures
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic, number_of
from whence.dependence.describe import shown
from whence.errors import Fault
from whence.interop.archive.records.forms import (
    Atom,
    Choice,
    Fixed,
    Form,
    Record,
    Row,
    Special,
    Table,
    form_of,
)
from whence.interop.archive.records.names import Described, class_name
from whence.program import Absent, Constant, Named
from whence.program.guards.in_words import InWords, OfClass
from whence.provenance import CallSite, ModulePath, Source

_FEW = 4
NAMED = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "format"}


@dataclass
class Pool:
    """Things that are stored once and named by their number."""

    rows: list[Any] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, row: Any) -> int:
        """The number of a row."""
        key = json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]


@dataclass
class Writer:
    """Writes things by their form.

    `faults` is what could not be stored, `nodes` gives the number of a node whose arguments are being
    written. `described` says what is outside the program: functions, classes, variables, constants.
    """

    described: Described
    faults: list[Fault] = field(default_factory=list)
    sizes: SizeStructures = field(default_factory=SizeStructures)
    pools: dict[str, Pool] = field(default_factory=dict)
    nodes: Callable[[fx.Node], int] | None = None
    _classes: dict[str, list[type]] = field(default_factory=dict)
    _known: dict[tuple[str, int], int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def refuse(self, what: str, why: str = "", remedy: str = "") -> None:
        """Note what cannot be stored."""
        self.faults.append(Fault(what, why=why, remedy=remedy))

    def tables(self) -> dict[str, Any]:
        """The pools, in the order in which they can be read."""
        found = {name: pool.rows for name, pool in self.pools.items()}
        return {**found, "symbols": self.sizes.symbols}

    # --- by form -------------------------------------------------------------------------------------

    def write(self, form: Form, value: Any) -> Any:
        """A thing as plain data."""
        match form:
            case Atom():
                return self._number(value) if type(value) is float else value
            case Special(name):
                return self._special(name, value)
            case Record():
                return self.record(form, value)
            case Choice():
                return self._choice(form, value)
            case Row(Record() as of, kind=kind) if kind is tuple:
                return self.table(of, value)
            case Row(of):
                written = [self.write(of, each) for each in value]
                return sorted(written) if form.kind is frozenset else written
            case Fixed(items):
                return [self.write(of, each) for of, each in zip(items, value, strict=True)]
            case Table(key, of):
                return [[self.write(key, name), self.write(of, each)] for name, each in value.items()]

    def record(self, form: Record, value: Any) -> dict[str, Any]:
        """The fields of a record, but for those that are as they are where nobody says otherwise."""
        return {
            row.name: self.write(row.form, held)
            for row in form.fields
            if not _is_default(held := getattr(value, row.name), row.default)
        }

    def table(self, form: Record, values: Iterable[Any]) -> dict[str, Any]:
        """Rows as columns, of which those are left out that say nothing."""
        rows = list(values)
        columns: dict[str, Any] = {}
        for row in form.fields:
            held = [getattr(value, row.name) for value in rows]
            if not all(_is_default(each, row.default) for each in held):
                columns[row.name] = column([self.write(row.form, each) for each in held])
        return {"count": len(rows), "columns": columns}

    def _choice(self, form: Choice, value: Any) -> Any:
        if value is None:
            return None
        records = [option for option in form.options if isinstance(option, Record)]
        found = next((option for option in records if type(value) is option.kind), None)
        if found is not None:
            written = self.record(found, value)
            return written if len(form.options) == 1 else {found.kind.__name__: written}
        others = [option for option in form.options if not isinstance(option, Record)]
        atom = next((each for each in others if isinstance(each, Atom) and type(value) in each.kinds), None)
        return self.write(atom or others[0], value)

    def _special(self, name: str, value: Any) -> Any:
        return _SPECIAL[name](self, value) if name in _SPECIAL else value.value

    # --- anything ------------------------------------------------------------------------------------

    def anything(self, value: Any) -> Any:
        """A value that may be all sorts of things: itself, or an object with one key that says what it is."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return self._number(value)
        if kind is Unknown:
            return {"unknown": float(value)}
        if isinstance(value, fx.Node):
            return {"node": value.name if self.nodes is None else self.nodes(value)}
        if isinstance(value, Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, SYMBOLIC):
            return {"size": self.sizes.written(value)} if is_symbolic(value) else number_of(value)
        if kind in NAMED:
            return {NAMED[kind]: str(value).removeprefix("torch.")}
        return self._container(value)

    def _number(self, value: float) -> Any:
        return value if math.isfinite(value) else {"number": str(value)}

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, fx.immutable_collections.immutable_list) or kind is list:
            return [self.anything(each) for each in value]
        if kind in (tuple, torch.Size):
            return {"tuple" if kind is tuple else "shape": [self.anything(each) for each in value]}
        if isinstance(value, fx.immutable_collections.immutable_dict) or kind is dict:
            return {"mapping": [[self.anything(key), self.anything(held)] for key, held in value.items()]}
        if kind in (set, frozenset):
            rows = sorted((self.anything(each) for each in value), key=json.dumps)
            return {"set" if kind is set else "frozenset": rows}
        if kind in (slice, range):
            return {kind.__name__: [self.anything(each) for each in (value.start, value.stop, value.step)]}
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if type(value) is complex:
            return {"complex": [self._number(value.real), self._number(value.imag)]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if value is ...:
            return {"ellipsis": None}
        if isinstance(value, Enum):
            return {"enum": [self.class_(type(value)), value.name]}
        if isinstance(value, type):
            return {"class": self.class_(value)}
        if isinstance(value, InWords):
            return {"words": value.text}
        if (found := dim_in_words(value)) is not None:
            return {"words": found}
        return {"words": shown(value)}

    # --- pools ---------------------------------------------------------------------------------------

    def _pooled(self, pool: str, value: Any, row: Callable[[Any], Any]) -> int:
        """The number of a thing in a pool; looked up by identity first, which costs less than its words."""
        key = pool, id(value)
        if key not in self._known:
            self._kept.append(value)
            self._known[key] = self.pools.setdefault(pool, Pool()).number(row(value))
        return self._known[key]

    def path(self, value: ModulePath) -> int:
        """A module path."""
        return self._pooled("paths", value, list)

    def line(self, value: Source) -> int:
        """A line of code."""
        return self._pooled("lines", value, lambda line: [line.file, line.line, line.function])

    def site(self, value: CallSite) -> int:
        """A call of a module."""
        return self._pooled("sites", value, lambda site: [self.path(site.path), site.index, site.type])

    def class_(self, value: type) -> int:
        """A class, by its name; of several that have one name, which of them it is."""
        return self._pooled("classes", value, self._class)

    def _class(self, value: type) -> list[Any]:
        known = self._classes.setdefault(name := class_name(value), [])
        known.append(value)
        return [name, len(known) - 1]

    def structure(self, value: TreeSpec) -> int:
        """How values are nested."""
        return self._pooled("structures", value, self._structure)

    def _structure(self, spec: TreeSpec) -> list[Any] | None:
        if spec.is_leaf():
            return None
        context = self.anything(spec.context)
        if first_words(context) is not None:
            what = f"a {spec.type.__name__} among arguments or results"
            self.refuse(what, "what it is made with cannot be stored")
        kind = (
            self.class_(spec.type) if isinstance(spec.type, type) else None
        )  # a named tuple, by its context
        return [kind, context, [self.structure(child) for child in spec.children()]]

    def tensor(self, value: Tensor) -> int:
        """What is known of a tensor but its numbers, for each tensor by itself."""
        key = "tensors", id(value)
        if key not in self._known:
            self._kept.append(value)
            rows = self.pools.setdefault("tensors", Pool()).rows
            self._known[key] = len(rows)
            rows.append(None)
            rows[self._known[key]] = self._tensor(value)
        return self._known[key]

    def _tensor(self, value: Tensor) -> list[Any]:
        if value.layout is not torch.strided or value.is_quantized:
            self.refuse(f"a tensor with the layout {value.layout}", "only tensors with strides are stored")
            return []
        return [
            str(value.dtype).removeprefix("torch."),
            str(value.device),
            [self.anything(size) for size in value.shape],
            [self.anything(step) for step in value.stride()],
            value.requires_grad,
            isinstance(value, torch.nn.Parameter),
        ]

    def parameters(self, value: inspect.Signature) -> dict[str, Any]:
        """A Python signature; annotations are kept as they are printed."""
        rows = [
            [row.name, int(row.kind), *self._default(row.default), _annotation(row.annotation)]
            for row in value.parameters.values()
        ]
        return {"rows": rows, "returns": _annotation(value.return_annotation)}

    def _default(self, default: Any) -> list[Any]:
        return [False, None] if default is inspect.Parameter.empty else [True, self.anything(default)]

    def leaf(self, value: Named | Constant | Absent) -> Any:
        """A leaf of a structure: the name of a node, a constant, or why there is nothing."""
        match value:
            case Named(name):
                return name
            case Constant(held):
                return {"constant": self.anything(held)}
            case Absent(reason):
                return {"absent": reason}

    def adapter(self, value: Any) -> None:
        """What makes other arguments fit is a function of the user's."""
        if value is not None:
            self.refuse(f"the adapter of arguments {op_name(value)}", "a function cannot be stored")


def _annotation(found: Any) -> str | None:
    return None if found is inspect.Parameter.empty else inspect.formatannotation(found)


def first_words(written: Any) -> str | None:
    """The first thing in plain data that is there in words alone."""
    if isinstance(written, dict):
        if "words" in written:
            return str(written["words"])
        written = list(written.values())
    found = map(first_words, written) if isinstance(written, list) else ()
    return next((text for text in found if text is not None), None)


def _is_default(value: Any, default: Any) -> bool:
    if default is MISSING or type(value) is not type(default):
        return False
    if isinstance(default, tuple | frozenset | Mapping):
        return not default and not value
    return value is default or (type(value) in (bool, int, str) and value == default)


def column(values: list[Any]) -> Any:
    """A column; where much of it is the same, what there is once, and which of these each is."""
    numbers: dict[str, int] = {}
    at = [numbers.setdefault(key, len(numbers)) for key in _keys(values)]
    if len(numbers) * 2 > len(values) or len(values) < _FEW:
        return values
    distinct: list[Any] = [None] * len(numbers)
    for number, value in zip(at, values, strict=True):
        distinct[number] = value
    return {"distinct": distinct, "at": at}


def _keys(values: list[Any]) -> Iterator[str]:
    return (f"'{value}" if type(value) is str else json.dumps(value) for value in values)


def _nothing(_writer: Writer, _value: Any) -> None:
    return None


def _of_class(writer: Writer, value: Any) -> Any:
    return None if value is None else writer.class_(value.kind if isinstance(value, OfClass) else type(value))


def _function(_writer: Writer, value: Any) -> Any:
    return None if value is None else str(value) if isinstance(value, InWords) else op_name(value)


_SPECIAL: dict[str, Callable[[Writer, Any], Any]] = {
    "anything": Writer.anything,
    "leaf": Writer.leaf,
    "path": Writer.path,
    "line": Writer.line,
    "site": Writer.site,
    "class": Writer.class_,
    "structure": Writer.structure,
    "parameters": Writer.parameters,
    "adapter": Writer.adapter,
    "nothing": _nothing,
    "of class": _of_class,
    "function": _function,
    "sized": lambda _writer, value: value,
    "identifier": lambda _writer, value: value,
    "root": lambda writer, value: writer.described.root(value),
    "way": lambda writer, value: writer.described.way(value),
    "outside": _nothing,
    "reference": lambda writer, value: writer.described.object(value()),
    "target": lambda writer, value: writer.described.function(value),
    "code": lambda writer, value: writer.described.code(value),
    "constant": lambda writer, value: None if value is None else [writer.described.tensor(value())],
}


def written(writer: Writer, hint: Any, value: Any) -> Any:
    """A thing of the type that an annotation says."""
    return writer.write(form_of(hint), value)

"""Plain data becomes a program's records; the mirror of `writing.py`, case by case.

Everything is looked at before it is used: what a field may not hold is `Unreadable`. Nothing runs, nothing is
imported, and what a file calls a class or a function stays a name unless a live model is there to compare.
"""

import base64
import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whence._torch.fakes import as_leaf, fake_at
from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.pytrees import TreeSpec, container_spec, containers, leaf_spec
from whence._torch.sizes.numbers import Unknown
from whence._torch.sizes.structure import SizeReader
from whence._torch.sizes.symbols import mode_for_sizes
from whence.interop.archive.records.checked import (
    Unreadable,
    atom,
    expanded,
    identifier,
    infinite,
    listed,
    mapping,
    named_device,
    named_dtype,
    number,
    of_torch,
    optional,
    place,
    raise_unless,
    sized,
    text,
    truth,
)
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
from whence.interop.archive.records.names import CodePrint, LoadedNames, itself, looked_up
from whence.program import Absent, Constant, Named
from whence.program.guards.in_words import InWords, OfClass
from whence.provenance import CallSite, ModulePath, Source
from whence.schema import GuardKind, InputKind, OutputKind, Phase, Quality, Strictness

LARGEST = 2**62
_MOST_NUMBERS = 2**16
_DEEP = 200
_ENUMS: Mapping[str, type[StrEnum]] = {
    kind.__name__: kind for kind in (GuardKind, InputKind, OutputKind, Phase, Quality, Strictness)
}


@dataclass
class Reader:
    """Reads things by their form.

    `tables` are the pools of the file, `found` says what names stand for, `state` are the tensors of the
    program, `nodes` gives what a number in the arguments of a node stands for. `missing` collects classes of
    containers that this process does not know.
    """

    tables: Mapping[str, Any]
    found: LoadedNames
    state: Mapping[str, Tensor]
    missing: list[str] = field(default_factory=list)
    paths: list[ModulePath] = field(default_factory=list)
    lines: list[Source] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    structures: list[TreeSpec] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    nodes: Callable[[int], Any] | None = None
    sizes: SizeReader | None = None
    _readers: dict[int, tuple[Form, Callable[[Any], Any]]] = field(default_factory=dict)

    def read_tables(self) -> None:
        """Read the pools, each of which may name what is in those before."""
        self.paths = [ModulePath(map(text, row)) for row in self._rows("paths")]
        self.lines = [
            Source(text(file), number(line), text(name)) for file, line, name in self._rows("lines")
        ]
        self.sites = [
            CallSite(self.path(path), number(index), text(kind)) for path, index, kind in self._rows("sites")
        ]
        self.classes = [self.found.class_(text(name), number(nth)) for name, nth in self._rows("classes")]
        symbols = self._rows("symbols")
        mode = mode_for_sizes(vary=bool(symbols))
        if symbols:
            self.sizes = SizeReader(mode, [_symbol(*row) for row in symbols])
        self.tensors = [self._tensor(mode, *row) for row in self._rows("tensors")]
        for row in self._rows("structures"):
            self.structures.append(self._structure(row))

    def _rows(self, name: str) -> list[Any]:
        return listed(self.tables.get(name, []))

    # --- by form -------------------------------------------------------------------------------------

    def read(self, form: Form, data: Any) -> Any:
        """A thing of that form."""
        return self.reader(form)(data)

    def reader(self, form: Form) -> Callable[[Any], Any]:
        """What reads things of that form."""
        known = self._readers.get(id(form))
        if known is None:
            known = self._readers[id(form)] = form, self._made_reader(form)
        return known[1]

    def _made_reader(self, form: Form) -> Callable[[Any], Any]:
        match form:
            case Atom(kinds):
                return partial(atom, kinds)
            case Special(name):
                return self._special(name)
            case Record():
                return partial(self.record, form)
            case Choice():
                return partial(self._choice, form)
            case Row(Record() as of, kind=kind) if kind is tuple:
                return partial(self.table, of)
            case Row(of, kind):
                return lambda data: kind(map(self.reader(of), listed(data)))
            case Fixed(items):
                return lambda data: tuple(
                    self.read(of, each) for of, each in zip(items, listed(data), strict=True)
                )
            case Table(key, of):
                return lambda data: {self.read(key, name): self.read(of, each) for name, each in listed(data)}

    def record(self, form: Record, data: Any) -> Any:
        """A record of its fields."""
        given = dict(mapping(data))
        values = {
            row.name: self.read(row.form, given.pop(row.name)) if row.name in given else _default(row)
            for row in form.fields
        }
        if given:
            raise Unreadable(f"{form.kind.__name__} has no {', '.join(given)}")
        return self._made(form.kind, values)

    def table(self, form: Record, data: Any) -> tuple[Any, ...]:
        """Rows of columns."""
        given = mapping(data)
        count, columns = number(given["count"]), dict(mapping(given["columns"]))
        if not columns:
            raise_unless(count == 0, "there are rows without columns")
            return ()
        there = {row.name: row.form for row in form.fields}
        if unknown := columns.keys() - there.keys():
            raise Unreadable(f"{form.kind.__name__} has no {', '.join(unknown)}")
        found = {name: self._column(name, there[name], data, count) for name, data in columns.items()}
        held = [found[row.name] if row.name in found else [_default(row)] * count for row in form.fields]
        names = list(there)
        return tuple(
            self._made(form.kind, dict(zip(names, row, strict=True))) for row in zip(*held, strict=True)
        )

    def _column(self, name: str, form: Form, data: Any, count: int) -> Sequence[Any]:
        found = expanded(data, self.reader(form))
        raise_unless(len(found) == count, f"the column {name} is not as long as others")
        return found

    def _made(self, kind: Any, values: dict[str, Any]) -> Any:
        if "target" in values:
            values = self.found.resolved(kind, values)
        return kind(**values)

    def _choice(self, form: Choice, data: Any) -> Any:
        if data is None:
            raise_unless(form.empty, "something is missing")
            return None
        records = {option.kind.__name__: option for option in form.options if isinstance(option, Record)}
        if len(form.options) == 1:
            return self.read(form.options[0], data)
        if isinstance(data, dict) and len(data) == 1 and (name := next(iter(data))) in records:
            return self.record(records[name], data[name])
        others = [option for option in form.options if not isinstance(option, Record)]
        if not others:
            raise Unreadable(f"it is none of {', '.join(records)}")
        atom = next((each for each in others if isinstance(each, Atom)), None)
        return self.read(atom or others[0], data)

    def _special(self, name: str) -> Callable[[Any], Any]:
        if name in _ENUMS:
            return _ENUMS[name]
        return partial(_SPECIAL[name], self)

    # --- anything ------------------------------------------------------------------------------------

    def anything(self, data: Any, depth: int = 0) -> Any:
        """What may be all sorts of things."""
        if data is None or type(data) in (bool, int, float, str):
            return data
        raise_unless(depth < _DEEP, "things are nested too deeply")
        if isinstance(data, list):
            return [self.anything(each, depth + 1) for each in data]
        ((kind, held),) = mapping(data).items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.anything(each, depth + 1) for each in listed(held))
        if kind == "mapping":
            rows = [(self.anything(k, depth + 1), self.anything(v, depth + 1)) for k, v in listed(held)]
            return dict(rows)
        if kind not in _ANYTHING:
            raise Unreadable(f"nobody knows what {kind!r} is")
        return _ANYTHING[kind](self, held)

    def node(self, data: Any) -> Any:
        """What a node is given of another one."""
        if self.nodes is None:
            raise Unreadable("a node is named where none can be")
        return self.nodes(data)

    def size(self, data: Any) -> Any:
        """A number that only a run has."""
        kind, hint, structure = listed(data)
        if self.sizes is None or kind not in ("whole", "real", "truth"):
            raise Unreadable("a size has no symbols")
        raise_unless(hint is None or type(hint) in (int, float, bool), "a size is no number in the example")
        return self.sizes.read(kind, hint, structure)

    def enumerated(self, data: Any) -> Any:
        """A member of an enumeration; in words where its class stays a name."""
        kind, name = listed(data)
        found = self.class_(kind)
        members = found.__members__ if issubclass(found, Enum) else {}
        return members.get(text(name), InWords(f"{found.__name__}.{name}"))

    # --- pools ---------------------------------------------------------------------------------------

    def path(self, data: Any) -> ModulePath:
        """A module path."""
        return self.paths[place(data, self.paths)]

    def line(self, data: Any) -> Source:
        """A line of code."""
        return self.lines[place(data, self.lines)]

    def site(self, data: Any) -> CallSite:
        """A call of a module."""
        return self.sites[place(data, self.sites)]

    def class_(self, data: Any) -> type:
        """A class."""
        return self.classes[place(data, self.classes)]

    def structure(self, data: Any) -> TreeSpec:
        """How values are nested."""
        return self.structures[place(data, self.structures)]

    def tensor(self, data: Any) -> Tensor:
        """What is known of a tensor but its numbers."""
        return self.tensors[place(data, self.tensors)]

    def _structure(self, row: Any) -> TreeSpec:
        if row is None:
            return leaf_spec()
        kind, context, children = listed(row)
        inside = [self.structure(child) for child in listed(children)]
        if kind is None:
            return container_spec(namedtuple, self._named_tuple(mapping(context)["class"]), inside)
        known = containers().get(name := self._name(kind))
        if known is None:
            self.missing.append(f"the class of containers {name.replace(':', '.')}")
        return container_spec(known or tuple, self.anything(context), inside)

    def _named_tuple(self, kind: Any) -> type:
        """A class that is loaded: a structure makes instances of it."""
        found = looked_up(name := self._name(kind))
        if found is NOTHING:
            self.missing.append(f"the named tuple {name.replace(':', '.')}")
            return tuple
        is_one = isinstance(found, type) and issubclass(found, tuple) and "_fields" in vars(found)
        raise_unless(is_one, f"{name} is no named tuple")
        return found  # type: ignore[no-any-return]

    def _name(self, kind: Any) -> str:
        return text(self._rows("classes")[place(kind, self.classes)][0])

    def _tensor(self, mode: Any, *row: Any) -> Tensor:
        dtype, device, shape, strides, requires_grad, is_parameter = row
        sizes, steps = ([self._length(each) for each in listed(part)] for part in (shape, strides))
        raise_unless(len(sizes) == len(steps) < LARGEST.bit_length(), "a tensor has other strides than sizes")
        fixed = [size for size in sizes if type(size) is int]
        extent = math.prod(max(size, 1) for size in fixed)
        reach = sum(
            size * step for size, step in zip(sizes, steps, strict=True) if type(size) is type(step) is int
        )
        raise_unless(max(extent, reach) < LARGEST // 32, "a tensor is larger than any memory")
        kind = named_dtype(dtype)
        tracked = truth(requires_grad) and (kind.is_floating_point or kind.is_complex)
        made = fake_at(mode, named_device(device), kind, sizes, steps)
        return as_leaf(made, requires_grad=tracked, is_parameter=truth(is_parameter))

    def _length(self, data: Any) -> Any:
        found = self.anything(data)
        if type(found) is int:
            raise_unless(0 <= found < LARGEST, "a size is negative, or larger than any memory")
        elif not isinstance(found, torch.SymInt):
            raise Unreadable("a size is no whole number")
        return found

    def parameters(self, data: Any) -> inspect.Signature:
        """A Python signature."""
        given = mapping(data)
        rows = [
            inspect.Parameter(
                text(name),
                tuple(inspect._ParameterKind)[number(kind)],
                default=self.anything(default) if truth(has_default) else inspect.Parameter.empty,
                annotation=_annotation(annotation),
            )
            for name, kind, has_default, default, annotation in listed(given["rows"])
        ]
        return inspect.Signature(rows, return_annotation=_annotation(given["returns"]))

    def leaf(self, data: Any) -> Named | Constant | Absent:
        """A leaf of a structure."""
        if isinstance(data, str):
            return Named(data)
        ((kind, held),) = mapping(data).items()
        raise_unless(kind in ("constant", "absent"), "a leaf is neither a constant nor absent")
        return Constant(self.anything(held)) if kind == "constant" else Absent(text(held))

    def reference(self, data: Any) -> Any:
        """An object that is compared by identity."""
        return None if data is None else tuple(optional(text, each) for each in listed(data))

    def constant(self, data: Any) -> Any:
        """A tensor that has to be the program's own."""
        if data is None:
            return None
        (name,) = listed(data)
        if name is None or name not in self.state:
            self.found.lost.append("a tensor that the program has as a constant")
        return partial(itself, self.state.get(name))


def _symbol(name: Any, spelled: Any, kind: Any, value: Any, low: Any, high: Any) -> list[Any]:
    limits = [optional(number, each) for each in (value, low, high)]
    raise_unless(kind in ("whole", "real"), "a symbol is no number")
    raise_unless(all(each is None or abs(each) < LARGEST for each in limits), "a symbol has no such limits")
    return [identifier(name), text(spelled), kind, *limits]


def _default(row: Any) -> Any:
    if row.default is MISSING:
        raise Unreadable(f"{row.name} is missing")
    return row.default


@dataclass(frozen=True)
class Annotation:
    """Stands for an annotation, and is printed as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _annotation(data: Any) -> Any:
    return inspect.Parameter.empty if data is None else Annotation(text(data))


def _complex(_reader: Any, data: Any) -> complex:
    real, imaginary = (atom((float,), each) for each in listed(data))
    return complex(real, imaginary)


def _bytes(_reader: Any, data: Any) -> bytes:
    return base64.b64decode(text(data), validate=True)


def _slice(reader: Reader, data: Any) -> slice:
    start, stop, step = map(reader.anything, listed(data))
    return slice(start, stop, step)


def _range(_reader: Reader, data: Any) -> range:
    """Whoever prints it makes a list of it."""
    found = range(*map(number, listed(data)))
    raise_unless(not found[_MOST_NUMBERS:], "a range is longer than any argument")
    return found


def _ellipsis(_reader: Reader, _data: Any) -> Any:
    return ...


def _nothing(_reader: Reader, _data: Any) -> None:
    return None


def _outside(_reader: Reader, _data: Any) -> InWords:
    return InWords("what it was at capture")


def _size_of(items: Any) -> Any:
    held = tuple(items)
    raise_unless(all(isinstance(each, int | torch.SymInt) for each in held), "a shape holds no number")
    return torch.Size(held)


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "shape": _size_of,
    "set": set,
    "frozenset": frozenset,
}
_ANYTHING: Mapping[str, Callable[[Reader, Any], Any]] = {
    "node": Reader.node,
    "tensor": Reader.tensor,
    "size": Reader.size,
    "slice": _slice,
    "range": _range,
    "dtype": lambda _, data: of_torch(data, torch.dtype),
    "layout": lambda _, data: of_torch(data, torch.layout),
    "format": lambda _, data: of_torch(data, torch.memory_format),
    "device": lambda _, data: named_device(data),
    "number": lambda _, data: infinite(data),
    "complex": _complex,
    "unknown": lambda _, data: Unknown(atom((float,), data)),
    "bytes": _bytes,
    "ellipsis": _ellipsis,
    "enum": Reader.enumerated,
    "class": Reader.class_,
    "words": lambda _, data: InWords(text(data)),
}
_SPECIAL: Mapping[str, Callable[[Reader, Any], Any]] = {
    "anything": Reader.anything,
    "leaf": Reader.leaf,
    "path": Reader.path,
    "line": Reader.line,
    "site": Reader.site,
    "class": Reader.class_,
    "structure": Reader.structure,
    "parameters": Reader.parameters,
    "adapter": _nothing,
    "nothing": _nothing,
    "of class": lambda reader, data: None if data is None else OfClass(reader.class_(data)),
    "function": lambda _, data: None if data is None else InWords(text(data)),
    "sized": lambda _, data: sized(data),
    "identifier": lambda _, data: identifier(data),
    "root": lambda reader, data: reader.found.root(optional(_texts, data)),
    "way": lambda reader, data: reader.found.way(optional(lambda rows: [*map(_texts, listed(rows))], data)),
    "outside": _outside,
    "reference": Reader.reference,
    "target": lambda _, data: tuple(optional(text, each) for each in listed(data)),
    "code": lambda _, data: None if data is None else CodePrint(text(data)),
    "constant": Reader.constant,
}


def _texts(data: Any) -> list[str]:
    found = list(map(text, listed(data)))
    raise_unless(bool(found), "nothing is named")
    return found


def read(reader: Reader, hint: Any, data: Any) -> Any:
    """A thing of the type that an annotation says."""
    return reader.read(form_of(hint), data)

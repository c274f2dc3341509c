"""What may be all sorts of things: itself, or an object with one key that says what it is.

Each kind of value is a row of one table: of which classes it is, how it is written, and how it is read.
"""

import base64
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, Flag
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from whence._torch.sizes.dims import dim_in_words
from whence._torch.sizes.numbers import Unknown
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic, number_of
from whence._torch.subclasses.spread import Mesh, Spread, distributed, spread_layout
from whence._torch.subclasses.wrapper_subclasses import Composition
from whence.dependence.describe import shown
from whence.interop.archive.records.checked import (
    Unreadable,
    atom,
    infinite,
    listed,
    mapping,
    named_device,
    number,
    of_torch,
    raise_unless,
    text,
)
from whence.interop.archive.records.constants import is_told, read_constant, written_constant
from whence.program.names import InWords

if TYPE_CHECKING:
    from whence.interop.archive.records.reading import Reader
    from whence.interop.archive.records.writing import Writer

_MOST_NUMBERS = 2**16
_DEEP = 200
_SEVERAL = "|"


@dataclass(frozen=True)
class ValueKind:
    """A kind of value: of these classes, or derived from a `base`. What is inside is read by `inside`."""

    write: "Callable[[Writer, Any], Any]"
    read: "Callable[[Reader, Any, Callable[[Any], Any]], Any]"
    classes: tuple[type, ...] = ()
    base: type | tuple[type, ...] = ()


def written_value(writer: "Writer", value: Any) -> Any:
    """A value as plain data; in words, where nothing else says what it is."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (list, immutable_list):
        return _listing(writer, value)
    if isinstance(value, SYMBOLIC) and not is_symbolic(value):
        return number_of(value)
    name = _BY_CLASS.get(kind) or next((name for name, base in _DERIVED if isinstance(value, base)), "words")
    name = "constant" if name == "words" and is_told(value) else name
    return {name: VALUES[name].write(writer, value)}


def read_value(reader: "Reader", data: Any, depth: int = 0) -> Any:
    """The value again; `Unreadable` where it is nested too deeply, or nobody knows its kind."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    raise_unless(depth < _DEEP, "things are nested too deeply")
    inside = partial(read_value, reader, depth=depth + 1)
    if isinstance(data, list):
        return list(map(inside, data))
    ((kind, held),) = mapping(data).items()
    if kind not in VALUES:
        raise Unreadable(f"nobody knows what {kind!r} is")
    return VALUES[kind].read(reader, held, inside)


def _listing(writer: "Writer", values: Any) -> list[Any]:
    return [written_value(writer, each) for each in values]


def _container(kind: type, made: Callable[[Any], Any], *, is_sorted: bool = False) -> ValueKind:
    def write(writer: "Writer", value: Any) -> list[Any]:
        return sorted(_listing(writer, value), key=json.dumps) if is_sorted else _listing(writer, value)

    return ValueKind(write, lambda _, data, inside: made(map(inside, listed(data))), (kind,))


def _size_of(items: Any) -> Any:
    held = tuple(items)
    raise_unless(all(isinstance(each, int | torch.SymInt) for each in held), "a shape holds no number")
    return torch.Size(held)


def _of_torch(kind: type, read: Callable[[Any], Any] | None = None) -> ValueKind:
    named = read or partial(of_torch, kind=kind)
    return ValueKind(
        lambda _, value: str(value).removeprefix("torch."), lambda _, data, __: named(data), (kind,)
    )


def _slice_ends(writer: "Writer", value: Any) -> list[Any]:
    return _listing(writer, (value.start, value.stop, value.step))


def _slice(_reader: "Reader", data: Any, inside: Callable[[Any], Any]) -> slice:
    start, stop, step = map(inside, listed(data))
    return slice(start, stop, step)


def _range(_reader: "Reader", data: Any, _inside: object) -> range:
    """Whoever prints it makes a list of it."""
    found = range(*map(number, listed(data)))
    raise_unless(not found[_MOST_NUMBERS:], "a range is longer than any argument")
    return found


def _complex(_reader: "Reader", data: Any, _inside: object) -> complex:
    real, imaginary = (atom((float,), each) for each in listed(data))
    return complex(real, imaginary)


def _read_size(reader: "Reader", data: Any, _inside: object) -> Any:
    """A number that only a run has."""
    kind, hint, structure = listed(data)
    if reader.sizes is None or kind not in ("whole", "real", "truth"):
        raise Unreadable("a size has no symbols")
    raise_unless(hint is None or type(hint) in (int, float, bool), "a size is no number in the example")
    return reader.sizes.read(kind, hint, structure)


def _node(reader: "Reader", data: Any, _inside: object) -> Any:
    """What a node is given of another one."""
    if reader.nodes is None:
        raise Unreadable("a node is named where none can be")
    return reader.nodes(data)


@dataclass(frozen=True, slots=True)
class NamedMember(InWords):
    """Stands for a member of an enumeration whose class stays a name."""

    kind: type
    name: str


def _written_member(writer: "Writer", value: Any) -> list[Any]:
    if isinstance(value, NamedMember):
        return [writer.pooled("classes", value.kind), value.name]
    return [writer.pooled("classes", type(value)), _SEVERAL.join(_members_of(value))]


def _members_of(value: Enum) -> list[str]:
    """The name of a member, or of those that flags are made of."""
    kind = type(value)
    if value.name in kind.__members__ or not isinstance(value, Flag):
        return [str(value.name)]
    left: int = value.value
    names: list[str] = []
    for name, member in sorted(kind.__members__.items(), key=lambda row: row[1].value, reverse=True):
        if member.value and member.value & left == member.value:
            left, names = left & ~member.value, [*names, name]
    return names if not left else [str(value.name)]


def _member(reader: "Reader", data: Any, _inside: object) -> Any:
    """A member of an enumeration, or several flags; in words where its class stays a name."""
    kind, name = listed(data)
    found = reader.pooled("classes", kind)
    members = found.__members__ if issubclass(found, Enum) else {}
    names = [each for each in text(name).split(_SEVERAL) if each]
    parts = [members[each] for each in names if each in members]
    if len(parts) < len(names) or (not issubclass(found, Flag) and len(parts) != 1):
        return NamedMember(f"{found.__name__}.{name}", found, name)
    return parts[0] if len(parts) == 1 else found(sum(each.value for each in parts))


def _written_module(_writer: "Writer", module: Any) -> str:
    return str(vars(module).get("__name__"))


def _module(reader: "Reader", data: Any, _inside: object) -> Any:
    """A module that is loaded, beside a live model."""
    found = sys.modules.get(text(data)) if reader.found.classes is not None else None
    return InWords(data) if found is None else found


def _words(_writer: "Writer", value: Any) -> str:
    return value.text if isinstance(value, InWords) else dim_in_words(value) or shown(value)


def _written_composition(writer: "Writer", layout: Composition) -> Any:
    """How a tensor is made of others: of DTensors alone, for only their classes are known everywhere."""
    found = spread_layout(layout)
    if found is None:
        return {"words": repr(layout)}
    mesh, spread = found.context.mesh, found.context
    told = [found.names, mesh.device, mesh.axes, mesh.groups, spread.placements, spread.order, spread.dtype]
    return _listing(writer, (*told, tuple(found.shape), tuple(found.strides), found.follows, mesh.place))


def _spread(reader: "Reader", data: Any, inside: Callable[[Any], Any]) -> Composition:
    names, device, axes, groups, placements, order, *rest = map(inside, listed(data))
    dtype, shape, strides, follows, at = rest
    named = tuple((text(name), number(size)) for name, size in axes)
    mesh = Mesh(text(device), named, tuple(map(text, groups)), tuple(map(number, at)))
    raise_unless(isinstance(dtype, torch.dtype), "a tensor has no dtype")
    raise_unless(len(follows) == len(shape) + len(strides), "a tensor has other strides than sizes")
    spread = Spread(mesh, tuple(map(text, placements)), text(order), dtype)
    return distributed(
        spread, tuple(map(text, names)), (_size_of(shape), tuple(_size_of(strides))), follows, reader.meshes
    )


VALUES: Mapping[str, ValueKind] = {
    "node": ValueKind(
        lambda writer, node: node.name if writer.nodes is None else writer.nodes(node), _node, base=fx.Node
    ),
    "tensor": ValueKind(
        lambda writer, tensor: writer.pooled("tensors", tensor),
        lambda reader, data, _: reader.pooled("tensors", data),
        base=Tensor,
    ),
    "size": ValueKind(lambda writer, size: writer.sizes.written(size), _read_size, base=SYMBOLIC),
    "unknown": ValueKind(
        lambda _, value: float(value), lambda _, data, __: Unknown(atom((float,), data)), (Unknown,)
    ),
    "number": ValueKind(lambda _, value: str(value), lambda _, data, __: infinite(data), (float,)),
    "complex": ValueKind(
        lambda writer, value: _listing(writer, (value.real, value.imag)), _complex, (complex,)
    ),
    "dtype": _of_torch(torch.dtype),
    "device": _of_torch(torch.device, named_device),
    "layout": _of_torch(torch.layout),
    "format": _of_torch(torch.memory_format),
    "tuple": _container(tuple, tuple),
    "shape": _container(torch.Size, _size_of),
    "set": _container(set, set, is_sorted=True),
    "frozenset": _container(frozenset, frozenset, is_sorted=True),
    "mapping": ValueKind(
        lambda writer, value: [_listing(writer, row) for row in value.items()],
        lambda _, data, inside: {inside(key): inside(held) for key, held in listed(data)},
        (dict, immutable_dict),
    ),
    "slice": ValueKind(_slice_ends, _slice, (slice,)),
    "range": ValueKind(_slice_ends, _range, (range,)),
    "bytes": ValueKind(
        lambda _, value: base64.b64encode(value).decode("ascii"),
        lambda _, data, __: base64.b64decode(text(data), validate=True),
        base=bytes,
    ),
    "ellipsis": ValueKind(lambda *_: None, lambda *_: ..., (type(...),)),
    "enum": ValueKind(_written_member, _member, base=(Enum, NamedMember)),
    "class": ValueKind(
        lambda writer, value: writer.pooled("classes", value),
        lambda reader, data, _: reader.pooled("classes", data),
        base=type,
    ),
    "module": ValueKind(_written_module, _module, base=ModuleType),
    "constant": ValueKind(lambda _, value: written_constant(value), lambda _, data, __: read_constant(data)),
    "composed": ValueKind(_written_composition, _spread, (Composition,)),
    "words": ValueKind(_words, lambda _, data, __: InWords(text(data))),
}
_BY_CLASS = {each: name for name, kind in VALUES.items() for each in kind.classes}
_DERIVED = [(name, kind.base) for name, kind in VALUES.items() if kind.base]


def of_kind(written: Any, kind: str) -> Iterator[Any]:
    """What plain data says of each value of a kind, wherever it is inside."""
    if isinstance(written, dict):
        yield from [written[kind]] if kind in written else []
        written = list(written.values())
    for each in written if isinstance(written, list) else ():
        yield from of_kind(each, kind)


def first_words(written: Any) -> str | None:
    """The first thing in plain data that is there in words alone."""
    return next(map(str, of_kind(written, "words")), None)

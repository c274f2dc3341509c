"""What is stored in a way of its own, each kind once: how it becomes plain data, and how it is read.

Everything is looked at before it is used: what a field may not hold is `Unreadable`. Nothing runs, nothing is
imported, and what a file calls a class or a function stays a name unless a live model is there to compare.
"""

import inspect
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence._torch.fakes import as_leaf, fake_at
from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import TreeSpec, container_spec, containers, leaf_spec
from whence._torch.subclasses.spread import spread_layout
from whence._torch.subclasses.wrapper_subclasses import Composition
from whence.dependence.code import CodePrint
from whence.dependence.describe import itself
from whence.interop.archive.records.by_name import class_name, looked_up
from whence.interop.archive.records.checked import (
    LARGEST,
    Unreadable,
    identifier,
    listed,
    mapping,
    named_device,
    named_dtype,
    number,
    optional,
    place,
    raise_unless,
    sized,
    text,
    truth,
)
from whence.interop.archive.records.names import MODEL
from whence.interop.archive.records.values import first_words, of_kind
from whence.program import Absent, Constant, Named
from whence.program.names import InWords, OfClass
from whence.provenance import ModulePath
from whence.tracing.target.caches import opened

if TYPE_CHECKING:
    from whence.interop.archive.records.reading import Reader
    from whence.interop.archive.records.writing import Writer


@dataclass(frozen=True)
class Special:
    """What has a way of its own to be stored."""

    name: str
    write: "Callable[[Writer, Any], Any]" = field(compare=False)
    read: "Callable[[Reader, Any], Any]" = field(compare=False)


def enumerated(kind: type[StrEnum]) -> Special:
    """A word of a vocabulary."""
    return Special(kind.__name__, lambda _, value: value.value, lambda _, data: kind(data))


def _pooled(name: str, pool: str) -> Special:
    """What is stored once, and named by its number."""
    return Special(
        name, lambda writer, value: writer.pooled(pool, value), lambda reader, data: reader.pooled(pool, data)
    )


PATH, LINE, SITE = _pooled("path", "paths"), _pooled("line", "lines"), _pooled("site", "sites")
CLASS, STRUCTURE = _pooled("class", "classes"), _pooled("structure", "structures")
ANYTHING = Special(
    "anything", lambda writer, value: writer.anything(value), lambda reader, data: reader.anything(data)
)


def one_of_torch(kind: type) -> Special:
    """A dtype, a device, a layout."""

    def read(reader: "Reader", data: Any) -> Any:
        found = reader.anything(data)
        raise_unless(isinstance(found, kind), f"{kind.__name__} is said, and something else is there")
        return found

    return Special("anything", lambda writer, value: writer.anything(value), read)


def _read_none(_context: Any, _value: Any) -> None:
    return None


def _as_it_is(_writer: Any, value: Any) -> Any:
    return value


NOWHERE = Special("nothing", _read_none, _read_none)
SIZED = Special("sized", _as_it_is, lambda _, data: sized(data))
CONDITION = Special("sized", _as_it_is, lambda _, data: sized(text(data)))
IDENTIFIER = Special("identifier", _as_it_is, lambda _, data: identifier(data))
SYMBOL = Special("symbol", _as_it_is, lambda reader, data: reader.symbol(text(data)))
"""PyTorch's word for a size, which is another one where the size is made again."""
OUTSIDE = Special("outside", _read_none, lambda *_: InWords("what it was at capture"))


def _refuse_adapter(writer: "Writer", value: Any) -> None:
    """What makes other arguments fit is a function of the user's."""
    if value is not None:
        writer.refuse(f"the adapter of arguments {op_name(value)}", "a function cannot be stored")


ADAPTER = Special("adapter", _refuse_adapter, _read_none)


# --- functions, classes, variables: by their names ------------------------------------------------------


def _function(_writer: "Writer", value: Any) -> Any:
    return None if value is None else str(value) if isinstance(value, InWords) else op_name(value)


def _of_class(writer: "Writer", value: Any) -> Any:
    kind = value.kind if isinstance(value, OfClass) else type(value)
    return None if value is None else writer.pooled("classes", kind)


def _texts(data: Any) -> list[str]:
    found = list(map(text, listed(data)))
    raise_unless(bool(found), "nothing is named")
    return found


def _texts_or_none(data: Any) -> tuple[str | None, ...]:
    return tuple(optional(text, each) for each in listed(data))


def _target(data: Any) -> tuple[str | None, ...]:
    """A function in words, and its name where it has one."""
    found = _texts_or_none(data)
    raise_unless(len(found) == 2 and found[0] is not None, "a function is not said")
    return found


def _constant(writer: "Writer", value: Any) -> Any:
    """The name of a tensor that the program has as a constant; of none it has, any other will do."""
    name = None if value is None else writer.described.tensor(value())
    return None if name is None else [name]


def _read_constant(reader: "Reader", data: Any) -> Any:
    """A tensor that has to be the program's own."""
    if data is None:
        return None
    (name,) = listed(data)
    if name is None or name not in reader.state:
        reader.found.lost.append("a tensor that the program has as a constant")
    return partial(itself, reader.state.get(name))


FUNCTION = Special("function", _function, lambda _, data: optional(lambda said: InWords(text(said)), data))
OF_CLASS = Special(
    "of class",
    _of_class,
    lambda reader, data: optional(lambda at: OfClass(reader.pooled("classes", at)), data),
)
ROOT = Special(
    "root",
    lambda writer, value: writer.described.root(value),
    lambda reader, data: reader.found.root(optional(_texts, data)),
)
WAY = Special(
    "way",
    lambda writer, value: writer.described.way(value),
    lambda reader, data: reader.found.way(optional(lambda rows: [*map(_texts, listed(rows))], data)),
)
REFERENCE = Special(
    "reference",
    lambda writer, value: writer.described.object(value),
    lambda _, data: optional(_texts_or_none, data),
)
TARGET = Special(
    "target", lambda writer, value: writer.described.function(value), lambda _, data: _target(data)
)
CODE = Special(
    "code",
    lambda writer, value: writer.described.code(value),
    lambda reader, data: optional(lambda digest: CodePrint(text(digest), reader.release), data),
)
CONSTANT = Special("constant", _constant, _read_constant)


# --- tensors that are made of others --------------------------------------------------------------------


def _composition(writer: "Writer", value: Composition) -> Any:
    if spread_layout(value) is None:
        writer.refuse(f"what is known of a {value.kind.__name__}", "a file has only the name of its class")
    return writer.anything(value)


def _read_composition(reader: "Reader", data: Any) -> Any:
    """How a DTensor is spread, as data: no mesh is needed to compare it."""
    found = reader.anything(data)
    raise_unless(isinstance(found, Composition), "it is not said how a tensor is made")
    return spread_layout(found)


COMPOSITION = Special("anything", _composition, _read_composition)


# --- leaves of structures -------------------------------------------------------------------------------


def _leaf_record(writer: "Writer", value: Named | Constant | Absent) -> Any:
    """The name of a node, a constant, or why there is nothing."""
    match value:
        case Named(name):
            return name
        case Constant(held):
            return {"constant": writer.anything(held)}
        case Absent(reason):
            return {"absent": reason}


def _read_leaf(reader: "Reader", data: Any) -> Named | Constant | Absent:
    if isinstance(data, str):
        return Named(data)
    ((kind, held),) = mapping(data).items()
    raise_unless(kind in ("constant", "absent"), "a leaf is neither a constant nor absent")
    return Constant(reader.anything(held)) if kind == "constant" else Absent(text(held))


LEAF = Special("leaf", _leaf_record, _read_leaf)


# --- Python signatures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Annotation:
    """Stands for an annotation, and is printed as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _annotation(found: Any) -> str | None:
    return None if found is inspect.Parameter.empty else inspect.formatannotation(found)


def _read_annotation(data: Any) -> Any:
    return inspect.Parameter.empty if data is None else Annotation(text(data))


def _signature_record(writer: "Writer", value: inspect.Signature) -> dict[str, Any]:
    """Annotations are kept as they are printed."""
    rows = []
    for row in value.parameters.values():
        has_default = row.default is not inspect.Parameter.empty
        default = writer.anything(row.default) if has_default else None
        rows.append([row.name, int(row.kind), has_default, default, _annotation(row.annotation)])
    return {"rows": rows, "returns": _annotation(value.return_annotation)}


def _read_parameters(reader: "Reader", data: Any) -> inspect.Signature:
    given = mapping(data)
    rows = [
        inspect.Parameter(
            text(name),
            tuple(inspect._ParameterKind)[number(kind)],
            default=reader.anything(default) if truth(has_default) else inspect.Parameter.empty,
            annotation=_read_annotation(annotation),
        )
        for name, kind, has_default, default, annotation in listed(given["rows"])
    ]
    return inspect.Signature(rows, return_annotation=_read_annotation(given["returns"]))


PARAMETERS = Special("parameters", _signature_record, _read_parameters)


# --- names of nodes -------------------------------------------------------------------------------------


def _read_node_name(reader: "Reader", data: Any) -> str:
    if isinstance(data, str):
        return identifier(data)
    return reader.names[place(data, reader.names)]


NODE_NAME = Special("node name", lambda writer, name: writer.names.get(name, name), _read_node_name)
"""The name of a node, by its position; which may be one of another graph."""


# --- pools: a row for each thing ------------------------------------------------------------------------


def _class_row(writer: "Writer", value: type) -> list[Any]:
    """A class, by its name; which it is of several that have one name, and where the model has it."""
    known = writer.classes.setdefault(name := class_name(value), [])
    known.append(value)
    root, *way = writer.described.root(value) or [""]
    return [name, len(known) - 1, *([way] if root == MODEL else [])]


def _class(reader: "Reader", row: Any) -> type:
    name, nth, *ways = listed(row)
    way = tuple(map(text, *ways)) if ways else ()
    found = reader.found.class_(text(name), number(nth), way)
    if ways:
        reader.found.said.note(found, [MODEL, *way])
    return found


def _class_said(reader: "Reader", kind: Any) -> str:
    rows = reader.rows("classes")
    return text(rows[place(kind, rows)][0])


def _structure_row(writer: "Writer", spec: TreeSpec) -> list[Any] | None:
    """How values are nested; a named tuple has its class in its context."""
    if spec.is_leaf():
        return None
    context = writer.anything(spec.context)
    if first_words(context) is not None:
        what = f"a {spec.type.__name__} among arguments or results"
        writer.refuse(what, "what it is made with cannot be stored")
    kind = writer.pooled("classes", spec.type) if isinstance(spec.type, type) else None
    return [kind, context, [writer.pooled("structures", child) for child in spec.children()]]


def _read_structure(reader: "Reader", row: Any) -> TreeSpec:
    """The structure again; what this process cannot make has something in its place that says so."""
    if row is None:
        return leaf_spec()
    kind, context, children = listed(row)
    inside = [reader.pooled("structures", child) for child in listed(children)]
    if kind is None:
        named = _named_tuple(reader, mapping(context)["class"])
        raise_unless(len(getattr(named, "_fields", inside)) == len(inside), "a named tuple has other fields")
        return container_spec(namedtuple, named, inside)
    known = containers().get(name := _class_said(reader, kind)) or opened(looked_up(name))
    made = reader.anything(context)
    if known in (dict, OrderedDict, defaultdict):
        keys = set(made[1] if known is defaultdict else made)
        raise_unless(len(keys) == len(inside), "a mapping has other keys than values")
    if known is None:
        known = reader.found.unmade(name, _NO_CONTAINER, _REGISTER)
    elif stand_in := _stand_in(reader, context):
        known = reader.found.unmade(name, _MADE_WITH.format(class_name(stand_in).replace(":", ".")), _IMPORT)
    return container_spec(known, made, inside)


_NO_CONTAINER = "this process has no such class of containers"
_REGISTER = (
    "import the package that registers it before the file is loaded (commands do with --import; for caches "
    "of transformers call whence.register_caches()), or capture the model again"
)
_MADE_WITH = (
    "it is made with the class {}, of which a file has only the name: without a model such classes stay "
    "names, and with one they are those that are imported"
)
_IMPORT = "whence.load(path, model=...), once the module of the class is imported"


def _stand_in(reader: "Reader", context: Any) -> type | None:
    """A class in what a container is made with that stays a name. The user's code makes a container of its
    context, and calls what is there: any class that is loaded would be called by a file that names it."""
    kinds = (*of_kind(context, "class"), *(row[0] for row in of_kind(context, "enum")))
    found = (reader.pooled("classes", kind) for kind in kinds)
    return next(filter(reader.found.is_stand_in, found), None)


def _named_tuple(reader: "Reader", kind: Any) -> type:
    """A class that is loaded: a structure makes instances of it."""
    found = looked_up(name := _class_said(reader, kind))
    if found is NOTHING:
        return reader.found.unmade(name, "this process has no such named tuple", _REGISTER)
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    raise_unless(
        is_tuple and any("_fields" in vars(base) for base in found.__mro__), f"{name} is no named tuple"
    )
    return found  # type: ignore[no-any-return]


def _tensor_row(writer: "Writer", value: Tensor) -> list[Any]:
    """What is known of a tensor but its numbers."""
    if value.layout is not torch.strided or value.is_quantized:
        writer.refuse(f"a tensor with the layout {value.layout}", "only tensors with strides are stored")
        return []
    return [
        str(value.dtype).removeprefix("torch."),
        str(value.device),
        [writer.anything(size) for size in value.shape],
        [writer.anything(step) for step in value.stride()],
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
    ]


def _tensor(reader: "Reader", row: Any) -> Tensor:
    dtype, device, shape, strides, requires_grad, is_parameter = row
    sizes, steps = ([_length(reader, each) for each in listed(part)] for part in (shape, strides))
    raise_unless(len(sizes) == len(steps) < LARGEST.bit_length(), "a tensor has other strides than sizes")
    extent = math.prod(max(size, 1) for size in sizes if type(size) is int)
    reach = sum(
        size * step for size, step in zip(sizes, steps, strict=True) if type(size) is type(step) is int
    )
    raise_unless(max(extent, reach) < LARGEST // 32, "a tensor is larger than any memory")
    kind = named_dtype(dtype)
    tracked = truth(requires_grad) and (kind.is_floating_point or kind.is_complex)
    made = fake_at(reader.mode, named_device(device), kind, sizes, steps)
    return as_leaf(made, requires_grad=tracked, is_parameter=truth(is_parameter))


def _length(reader: "Reader", data: Any) -> Any:
    found = reader.anything(data)
    if type(found) is int:
        raise_unless(0 <= found < LARGEST, "a size is negative, or larger than any memory")
    elif not isinstance(found, torch.SymInt):
        raise Unreadable("a size is no whole number")
    return found


PATHS = Special("paths", lambda _, path: list(path), lambda _, row: ModulePath(map(text, row)))
CLASSES = Special("classes", _class_row, _class)
TENSORS = Special("tensors", _tensor_row, _tensor)
STRUCTURES = Special("structures", _structure_row, _read_structure)

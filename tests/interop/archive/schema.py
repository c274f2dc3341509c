"""The JSON Schema of a file's plain data, made of the annotations of a program's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, get_type_hints

from tests.schemas import LIST, NOTHING, TEXT, TRUTH, WHOLE, either, keyed, record_of, row_of, rows
from whence import schema as vocabularies
from whence.interop.archive.records.forms import Atom, Choice, Field, Fixed, Form, Record, Row, Table, form_of
from whence.interop.archive.records.kinds import Special
from whence.interop.archive.saved import _FIELDS, _FORMER, FORMAT, VERSION
from whence.program import FlatProgram
from whence.schema import Phase, Quality

Json = dict[str, Any]
_ATOMS = {bool: TRUTH, int: WHOLE, str: TEXT, float: {"$ref": "#/$defs/real"}}
_NAMES = row_of(either(TEXT, NOTHING), either(TEXT, NOTHING))
_SPECIAL: Mapping[str, Json] = {
    **dict.fromkeys(("path", "line", "site", "class", "structure"), WHOLE),
    **dict.fromkeys(("adapter", "nothing", "outside"), NOTHING),
    **dict.fromkeys(("function", "code"), either(TEXT, NOTHING)),
    "anything": {"$ref": "#/$defs/anything"},
    "sized": {"$ref": "#/$defs/expression"},
    **dict.fromkeys(("identifier", "symbol"), TEXT),
    "leaf": either(TEXT, keyed("constant", {"$ref": "#/$defs/anything"}), keyed("absent", TEXT)),
    "of class": either(WHOLE, NOTHING),
    "parameters": {"$ref": "#/$defs/parameters"},
    "root": either(rows(TEXT), NOTHING),
    "way": either(rows(rows(TEXT)), NOTHING),
    "reference": either(_NAMES, NOTHING),
    "target": row_of(TEXT, either(TEXT, NOTHING)),
    "constant": either(row_of(either(TEXT, NOTHING)), NOTHING),
}


def archive_schema() -> Json:
    """The whole of it: every record is a definition under its name."""
    hints = get_type_hints(FlatProgram)
    records: dict[str, Json] = {}
    fields = {name: _of(form_of(hints[name]), records) for name in _FIELDS}
    fields |= {name: _of(form, records) for name, form in _FORMER.items()}
    head = {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "torch": TEXT,
        "name": TEXT,
        "weights": TRUTH,
    }
    own = {"graphs": rows({"$ref": "#/$defs/graph"}), "tables": _TABLES, "unread": WHOLE}
    parts = {"graphs": own["graphs"], "tensors": rows(_STORED), "tables": own["tables"], "unread": WHOLE}
    parts["variants"] = rows({"$ref": "#/$defs/variant"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:whence:archive:{VERSION}",
        "title": "program.json, the plain data in a file that program.save wrote",
        **record_of({**head, **fields, **parts}, ["variants", "unread", *_FORMER]),
        "$defs": {**_DEFINITIONS, **records, "variant": record_of({**fields, **own}, ["unread", *_FORMER])},
    }


def _of(form: Form, records: dict[str, Json]) -> Json:
    match form:
        case Atom(kinds):
            return either(*(_ATOMS[kind] for kind in kinds))
        case Special(name):
            return _SPECIAL[name] if name in _SPECIAL else _vocabulary(name)
        case Record():
            return _record(form, records)
        case Row(Record() as of, kind=kind) if issubclass(kind, tuple):
            return _table(of, records)
        case Row(of):
            return rows(_of(of, records))
        case Fixed(items):
            return row_of(*(_of(item, records) for item in items))
        case Table(key, of):
            return rows(row_of(_of(key, records), _of(of, records)))
        case Choice():
            return _choice(form, records)


def _vocabulary(name: str) -> Json:
    return {"enum": [word.value for word in getattr(vocabularies, name)]}


def _choice(form: Choice, records: dict[str, Json]) -> Json:
    found = []
    for option in form.options:
        made = _of(option, records)
        several = isinstance(option, Record) and len(form.options) > 1
        found.append(keyed(option.kind.__name__, made) if several and isinstance(option, Record) else made)
    return either(*found, *([NOTHING] if form.empty else []))


def _record(form: Record, records: dict[str, Json]) -> Json:
    name = form.kind.__name__
    if name not in records:
        records[name] = {}  # which records of this kind inside it refer to
        properties = {row.name: _of(row.form, records) for row in form.fields}
        records[name] = record_of(properties, [row.name for row in form.fields if _may_be_left_out(row)])
    return {"$ref": f"#/$defs/{name}"}


def _may_be_left_out(row: Field) -> bool:
    return row.default is not MISSING


def _table(of: Record, records: dict[str, Json]) -> Json:
    """Rows of records are columns."""
    name = f"{of.kind.__name__}Rows"
    if name not in records:
        records[name] = {}
        columns = {row.name: _column(_of(row.form, records)) for row in of.fields}
        records[name] = record_of({"count": WHOLE, "columns": record_of(columns, tuple(columns))})
    return {"$ref": f"#/$defs/{name}"}


def _column(of: Json) -> Json:
    """A row for each; or what there is once, and which of these each is."""
    return either(rows(of), record_of({"distinct": rows(of), "at": rows(WHOLE)}))


def _values(*names: str, of: Json) -> list[Json]:
    return [keyed(name, of) for name in names]


_ANYTHING: Json = {"$ref": "#/$defs/anything"}
_MANY = rows(_ANYTHING)
_PAIRS = rows(row_of(_ANYTHING, _ANYTHING))
_ANY_VALUE = either(
    *(NOTHING, TRUTH, {"type": "number"}, TEXT, _MANY),
    *_values("dtype", "device", "layout", "format", "bytes", "words", of=TEXT),
    *_values("node", of=either(WHOLE, TEXT)),
    *_values("tensor", "class", of=WHOLE),
    *_values("tuple", "shape", "set", "frozenset", of=_MANY),
    *_values("mapping", of=_PAIRS),
    *_values("slice", "range", of={**_MANY, "minItems": 3, "maxItems": 3}),
    *_values("complex", of=row_of({"$ref": "#/$defs/real"}, {"$ref": "#/$defs/real"})),
    *_values("number", of={"enum": ["inf", "-inf", "nan"]}),
    *_values("unknown", of={"type": "number"}),
    *_values("size", of={"$ref": "#/$defs/expression"}),
    *_values("enum", of=row_of(WHOLE, TEXT)),
    *_values("ellipsis", of=NOTHING),
)
_EXPRESSION = either(NOTHING, TRUTH, {"type": "number"}, TEXT, rows({"$ref": "#/$defs/expression"}))
_REAL = either({"type": "number"}, keyed("number", {"enum": ["inf", "-inf", "nan"]}))
_PARAMETER = row_of(TEXT, WHOLE, TRUTH, _ANYTHING, either(TEXT, NOTHING))
_PARAMETERS = record_of({"rows": rows(_PARAMETER), "returns": either(TEXT, NOTHING)})
_NUMBERED = rows(either(WHOLE, NOTHING))


def _words(kinds: Sequence[str]) -> Json:
    return {"enum": list(kinds)}


_GRAPH = record_of(
    {
        "name": TEXT,
        "names": rows(TEXT),
        "kinds": _column(_words(("placeholder", "get_attr", "call_function", "output"))),
        "targets": rows(either(WHOLE, TEXT, row_of(TEXT, WHOLE))),
        "forms": rows(WHOLE),
        "reads": rows(WHOLE),
        "values": _NUMBERED,
        "origins": _NUMBERED,
        "records": rows(
            row_of(WHOLE, rows(WHOLE), rows(LIST), rows(row_of(either(WHOLE, TEXT), WHOLE)), rows(WHOLE))
        ),
        "functions": rows(row_of(WHOLE, WHOLE)),
        "notes": rows(row_of(WHOLE, _ANYTHING)),
    }
)
_DEFINITIONS: Mapping[str, Json] = {
    "anything": _ANY_VALUE,
    "expression": _EXPRESSION,
    "real": _REAL,
    "parameters": _PARAMETERS,
    "graph": _GRAPH,
}
_MEMORY = either(row_of(TEXT, WHOLE), NOTHING)
_STORED = either(
    row_of(TEXT, TEXT),
    row_of(
        TEXT, _words(("tensor", "parameter", "buffer")), TEXT, TEXT, rows(WHOLE), rows(WHOLE), TRUTH, _MEMORY
    ),
)
_ORIGIN = {
    **row_of(
        *(_words([*Phase]), rows(WHOLE), _words([*Quality]), either(WHOLE, NOTHING)),
        *(either(WHOLE, TEXT, NOTHING), either(WHOLE, NOTHING), TRUTH, either(TEXT, NOTHING), rows(TEXT)),
    ),
    "minItems": 6,
}
_STRUCTURE = row_of(either(WHOLE, NOTHING), _ANYTHING, rows(WHOLE))
_LIMIT = either(WHOLE, NOTHING)
_TABLES = record_of(
    {
        "paths": rows(rows(TEXT)),
        "lines": rows(row_of(TEXT, WHOLE, TEXT)),
        "sites": rows(row_of(WHOLE, WHOLE, TEXT)),
        "classes": rows({**row_of(TEXT, WHOLE, rows(TEXT)), "minItems": 2}),
        "structures": rows(either(_STRUCTURE, NOTHING)),
        "tensors": rows(row_of(TEXT, TEXT, _MANY, _MANY, TRUTH, TRUTH)),
        "symbols": rows(row_of(TEXT, TEXT, _words(("whole", "real")), _LIMIT, _LIMIT, _LIMIT)),
        "targets": rows({**rows(TEXT), "minItems": 2, "maxItems": 4}),
        "forms": rows(row_of(_MANY, rows(row_of(TEXT, _ANYTHING)))),
        "values": _MANY,
        "origins": rows(_ORIGIN),
        "functions": rows(row_of(TEXT, TEXT)),
    },
    (
        "paths",
        "lines",
        "sites",
        "classes",
        "structures",
        "tensors",
        "targets",
        "forms",
        "values",
        "origins",
        "functions",
    ),
)

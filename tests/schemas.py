"""The published JSON Schemas, and how they are looked at in tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

Json = dict[str, Any]
NOTHING: Json = {"type": "null"}
TEXT: Json = {"type": "string"}
TRUTH: Json = {"type": "boolean"}
WHOLE: Json = {"type": "integer"}
LIST: Json = {"type": "array"}


def published(name: str) -> Json:
    """The schema of that name, as users find it in the package."""
    found: Json = json.loads(files("whence").joinpath("schemas", f"{name}-1.json").read_text())
    return found


def faults(name: str, data: Any) -> list[str]:
    """Where data are otherwise than the schema says; keys that it does not list count, too."""
    validator = Draft202012Validator(closed(published(name)))
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(data)]


def closed(schema: Any) -> Any:
    """The schema with other keys forbidden wherever it lists some: what a release of whence writes."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    lists = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **made} if lists else made


def rows(of: Json) -> Json:
    """A row of things that are alike."""
    return {"type": "array", "items": of}


def row_of(*items: Json) -> Json:
    """A row of so many things."""
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items)}


def either(*options: Json) -> Json:
    """One of several."""
    return options[0] if len(options) == 1 else {"anyOf": list(options)}


def keyed(key: str, of: Json) -> Json:
    """An object with one key that says what it is."""
    return {**record_of({key: of}), "additionalProperties": False}


def record_of(properties: Json, optional: Sequence[str] = ()) -> Json:
    """An object of these keys."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}

"""Records as plain data: what tools and people read as JSON."""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

SCHEMA = 1
"""The version of plain data, whose schemas are in `schemas/`."""


class AsJSON:
    """What says itself as plain data says itself as JSON."""

    __slots__ = ()

    def to_dict(self) -> Any:
        """Plain data."""
        raise NotImplementedError

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON, with the version of its schema."""
        return json.dumps(with_version(self.to_dict()), indent=indent, allow_nan=False)


def with_version(data: Any) -> Any:
    """Plain data that says of which version it is, where it has keys."""
    return {"schema": SCHEMA, **data} if isinstance(data, dict) else data


def plain_fields(record: object, *names: str) -> dict[str, Any]:
    """What a record says under these names."""
    return {name: plain(getattr(record, name)) for name in names}


def plain(value: Any) -> Any:
    """Numbers, texts and rows of them, records in their own form, and anything else as it prints."""
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    is_row = type(value) in (tuple, list)  # a path of a module is a text
    return [plain(each) for each in value] if is_row else str(value)

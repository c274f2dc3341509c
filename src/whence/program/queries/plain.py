"""Records as plain data: what tools and people read as JSON."""

from collections.abc import Mapping
from enum import StrEnum
from html import escape
from typing import Any

_MOST_LINES = 60


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


def opening_html(line: str, page: str) -> str:
    """A line that opens to the beginning of a page; both are text, whatever is in them."""
    lines = page.splitlines()
    rest = len(lines) - _MOST_LINES
    shown = lines[:_MOST_LINES] + ([f"… and {rest:,} more lines: print it"] if rest > 0 else [])
    style = "margin:0.4em 0;line-height:1.35;overflow-x:auto"
    text = escape("\n".join(shown))
    return (
        f"<details><summary><code>{escape(line)}</code></summary><pre style='{style}'>{text}</pre></details>"
    )


class OpensInNotebook:
    """What prints as a page: a notebook shows its line, which opens."""

    def _repr_html_(self) -> str:
        return opening_html(repr(self), str(self))

"""One page: the template that `viewer/` builds, with the data of one program, or of two, in it.

Whatever is in the data is text that somebody else wrote: it goes in as base64 and as JSON without a `<`, and
the page inserts it as text alone.
"""

import base64
import html
import json
import re
import tempfile
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from whence.viewer.columns import columns

TITLE, DATA = "WHENCE_TITLE", "WHENCE_DATA"
"""What stands in the template for the two."""

Figures = Mapping[str, Any]


def page(figures: Figures, other: Figures | None = None, difference: Mapping[str, Any] | None = None) -> str:
    """The page about what `reports.figures` says of a program, or of two and their difference."""
    shown = [columns(each) for each in (figures, other) if each is not None]
    title = " and ".join(dict.fromkeys(each["name"] for each in shown))
    data = {"programs": shown, "difference": difference}
    head, between, tail = _page_parts()
    return "".join([head, html.escape(f"{title} – whence"), between, packed(data), tail])


@cache
def _page_parts() -> tuple[str, str, str]:
    template = (files("whence.viewer") / "page.html").read_text(encoding="utf-8")
    head, _, rest = template.partition(TITLE)
    between, _, tail = rest.partition(DATA)
    return head, between, tail


def packed(data: Mapping[str, Any]) -> str:
    """JSON in a word of base64, compressed."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    deflated = base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode("ascii")
    return escaped({"deflate": deflated, "bytes": len(text)})


def escaped(data: Any) -> str:
    """JSON that may stand in a script element, whatever its texts are."""
    return json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def written(text: str, name: str, path: str | Path | None) -> Path:
    """Write a page about the program of that name, into a new folder where no path is given."""
    found = Path(tempfile.mkdtemp(prefix="whence-")) / file_name(name) if path is None else Path(path)
    found.write_text(text, encoding="utf-8")
    return found


def file_name(name: str) -> str:
    """A name that is one on every system: `whence-GPT.html`."""
    return f"whence-{re.sub(r'[^A-Za-z0-9_-]+', '', name) or 'program'}.html"

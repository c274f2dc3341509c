"""Where a page is written."""

import re
import tempfile
from pathlib import Path


def written(text: str, name: str, path: str | Path | None) -> Path:
    """Write a page about the program of that name, into a new folder where no path is given."""
    found = Path(tempfile.mkdtemp(prefix="whence-")) / file_name(name) if path is None else Path(path)
    found.write_text(text, encoding="utf-8")
    return found


def file_name(name: str) -> str:
    """A name that is one on every system: `whence-GPT.html`."""
    return f"whence-{re.sub(r'[^A-Za-z0-9_-]+', '', name) or 'program'}.html"

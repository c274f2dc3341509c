"""What a notebook shows of something that prints as a page: one line, which opens."""

from html import escape

_MOST_LINES, _LONGEST = 60, 400


def opening_html(line: str, page: str) -> str:
    """A line that opens to the beginning of a page; both are text, whatever is in them."""
    lines = page.splitlines()
    rest = len(lines) - _MOST_LINES
    shown = lines[:_MOST_LINES] + ([f"… and {rest:,} more lines: print it"] if rest > 0 else [])
    style = "margin:0.4em 0;line-height:1.35;overflow-x:auto"
    head, text = escape(_cut(line)), escape("\n".join(map(_cut, shown)))
    return f"<details><summary><code>{head}</code></summary><pre style='{style}'>{text}</pre></details>"


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


class OpensInNotebook:
    """What prints as a page: a notebook shows its line, which opens."""

    def _repr_html_(self) -> str:
        return opening_html(repr(self), str(self))

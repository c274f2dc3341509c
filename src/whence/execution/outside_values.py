"""Is what a step reads outside of itself as it was when the step was captured?"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.plain_values import same_constant
from whence.errors import Fault
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.names import InWords

AGAIN = "capture again"
_WIDTH = 100


def other_values(rows: Iterable[Outside]) -> list[Fault]:
    """What has changed, by name."""
    pairs = [(row, row.now()) for row in rows]
    return [
        Fault(
            _said(row, now),
            why="the step reads it outside of itself, where it is a constant of the program",
            remedy=f"pass it as an argument of the step, or {AGAIN}",
        )
        for row, now in pairs
        if not same_constant(row.value, now)
    ]


def _said(row: Outside, now: Any) -> str:
    if isinstance(row.value, InWords):
        return f"the step reads `{row.path}`, which is not in a file"
    if isinstance(row.value, Tensor) and isinstance(now, Tensor):
        return f"`{row.path}` is another tensor than at capture"
    return f"`{row.path}` was {_spelled(row.value)} at capture, is {_spelled(now)} now"


def _spelled(value: object) -> str:
    if value is NOTHING:
        return "absent"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"

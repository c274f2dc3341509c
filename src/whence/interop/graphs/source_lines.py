"""The line of the user's code behind a node, read from the stack trace that torch.export writes down."""

import re

from torch import fx

from whence._torch.files import TORCH
from whence.provenance import Source

_ENTRY = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def source_of(node: fx.Node) -> Source | None:
    """The innermost line that is not PyTorch's own, or else the innermost; None where nothing was kept."""
    found = _ENTRY.findall(str(node.meta.get("stack_trace") or ""))
    lines = [Source(file, int(line), function) for file, line, function in found]
    own = [line for line in lines if not line.file.startswith(TORCH)]
    return next(reversed(own or lines), None)

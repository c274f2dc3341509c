"""Which Python values are plain: their type and equality say all about them, and they never change."""

import torch

PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Types of values that hold no others."""
PLAIN_IN_WHOLE = frozenset({*PLAIN, range, slice, torch.Size})
"""The same with types of values that hold such, and, while sizes are open, symbols."""

"""Which kernels of attention take fewer heads of keys than of queries: more of them from PyTorch 2.14 on."""

import re

from whence._torch.versions.release import release

_FIRST = (2, 14)
GROUPED_EVERYWHERE = tuple(map(int, re.findall(r"\d+", release())[:2])) >= _FIRST
"""Whether the memory-efficient kernel does, and whether one head serves all without being asked to."""

"""Objects of opaque classes, which operators take and nobody looks into.

PyTorch 2.14 renamed "reference" types to "symbolic" ones, and writes to the log when it is asked by the old
name.
"""

from collections.abc import Callable
from typing import Any

from torch._library import opaque_object

_SINCE_14: Any = getattr(opaque_object, "is_opaque_symbolic_type", None)
is_opaque: Callable[[type], bool] = _SINCE_14 or opaque_object.is_opaque_reference_type
"""Whether objects of a class are opaque, and no constants."""

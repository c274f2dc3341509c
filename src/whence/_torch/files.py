"""Whose code a file holds."""

import os
import sysconfig

_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib"))


def is_standard_library(file: str) -> bool:
    """Whether a file is Python's own; what is installed beside it is not."""
    return file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)

"""Whose code a file holds, and in which a function is defined."""

import inspect
import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WHENCE = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of this package."""
DOOR = f"{Path(__file__).parent}{os.sep}"
"""The folder of what knows PyTorch's private parts, with the code that runs inside of every operation."""
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
"""The folder of torch."""
COMPUTING = tuple(f"{TORCH}{room}{os.sep}" for room in ("nn", "distributions", "optim"))
"""The folders of what computes in Python, by functions that it calls by name."""
FUNCTIONS_OF_C: Any = torch._VF
"""Where PyTorch's recurrent networks look up functions in C, and anybody may put another."""
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib"))


def is_standard_library(file: str) -> bool:
    """Whether a file is Python's own; what is installed beside it is not."""
    return file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, whose code seldom changes while a process runs."""
    return file.startswith(_INSTALLED)


def is_library(module: str | None) -> bool:
    """Whether a module of that name is Python's, torch's, NumPy's or ours: no user's."""
    package = str(module).partition(".")[0]
    return package in ("torch", "numpy", "whence") or package in sys.stdlib_module_names


def folder_of(package: str) -> str | None:
    """Where a package is installed, found without importing it; None if it is not."""
    found = find_spec(package)
    return None if found is None or found.origin is None else f"{Path(found.origin).parent}{os.sep}"


ALGEBRA = tuple(folder for name in ("sympy", "mpmath", "networkx") if (folder := folder_of(name)))
"""Where the packages are by which torch computes with sizes, and cuts graphs in two."""


def hook_in_words(hook: Any) -> str:
    """The name of a hook and the line where it is defined: `clip at model.py:12`."""
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    function = inspect.unwrap(hook) if callable(hook) else hook
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"

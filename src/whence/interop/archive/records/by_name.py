"""Things outside a program by the names under which they are found among what is loaded; no code runs for
it."""

import sys
from collections.abc import Mapping
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch

from whence._torch.observe.attribute_reads import NOTHING
from whence.dependence.code import function_in, innermost
from whence.dependence.describe import METHODS_OF_C

_FUNCTION = "__func__"
"""Behind the name of a static method: the function, where a class holds what wraps it."""
INSIDE = "__wrapped__"
"""Behind the name of a function: that around which others are, such as what PyTorch puts around the step of
an optimizer's class when it makes the first one."""


def class_name(kind: type) -> str:
    """Where a class is; one that C++ made under another name (`_SDPBackend`) is where its short one leads."""
    name, short = f"{kind.__module__}:{kind.__qualname__}", f"{kind.__module__}:{kind.__name__}"
    return short if looked_up(name) is NOTHING and looked_up(short) is kind else name


def is_found_by_name(kind: type) -> bool:
    """Whether its name leads to a class."""
    return looked_up(class_name(kind)) is kind


def looked_up(name: str) -> Any:
    """What is called so among what is loaded; `NOTHING` where nothing is. No code runs for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module, NOTHING)
    for part in path.split("."):
        if part == _FUNCTION and isinstance(found, staticmethod | classmethod):
            found = found.__func__
            continue
        if part == INSIDE:
            found = innermost(found) if isinstance(found, FunctionType) else NOTHING
            continue
        held = getattr(type(found), "__dict__", {}) if found is NOTHING else _dictionary_of(found)
        found = held.get(part, NOTHING)
    return found


def _dictionary_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, type):
        return type.__dict__["__dict__"].__get__(thing)  # type: ignore[no-any-return]
    return thing.__dict__ if type(thing) is type(sys) else {}


def name_of(thing: Any) -> str | None:
    """The name under which a thing is found among what is loaded; None where it is not found by name."""
    named = function_in(thing) or thing
    module, path = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    if isinstance(thing, (MemberDescriptorType, *METHODS_OF_C)):
        module = thing.__objclass__.__module__  # a slot or a method of C says its class alone
    is_dtype = isinstance(thing, torch.dtype)
    last = str(thing).removeprefix("torch.") if is_dtype else getattr(named, "__name__", None)
    candidates = [(module, path), ("torch", last), ("torch.nn.functional", last), ("builtins", path)]
    for where, spelled in candidates:
        if not isinstance(where, str) or not isinstance(spelled, str):
            continue
        for name in (f"{where}:{spelled}{behind}" for behind in ("", f".{_FUNCTION}", f".{INSIDE}")):
            if looked_up(name) is thing:
                return name
    return None


def namespace(module: str) -> dict[str, Any] | None:
    """The variables of a file that is loaded."""
    found = sys.modules.get(module)
    return found.__dict__ if type(found) is type(sys) else None

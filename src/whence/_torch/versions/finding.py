"""Look for private parts of the PyTorch that is installed."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from whence._torch.versions.relied_on import ATTRIBUTES, NAMES, VARIABLES

_GONE: Any = object()
_UNKNOWN: Any = object()


def names_gone(*, load: bool) -> list[str]:
    """The names that are not there; without `load` only what is loaded is looked at."""
    return [name for name, is_there in _looked_for(NAMES, load=load, spoken=False) if is_there is False]


def looked_for() -> dict[str, bool]:
    """Everything private that whence relies on, and whether it is there; loads what it takes to tell.

    An attribute that objects are given is there when its class speaks of it, a variable when its function
    does. What is in a module that cannot be loaded is not there.
    """
    names = _looked_for(NAMES, load=True, spoken=False)
    others = (row for table in (ATTRIBUTES, VARIABLES) for row in _looked_for(table, load=True, spoken=True))
    return {name: bool(is_there) for name, is_there in (*names, *others)}


def is_there(name: str) -> bool:
    """Whether a dotted name leads somewhere."""
    return _reached_name(name, load=True) is not _GONE


def _looked_for(table: Mapping[str, str], *, load: bool, spoken: bool) -> Iterator[tuple[str, bool | None]]:
    """Each name, and whether it is there; None where that is not known."""
    for owner, names in table.items():
        found = _reached_name(owner, load=load)
        for name in names.split():
            is_held = found is not _GONE and any(hasattr(found, one) for one in name.split("|"))
            is_there = is_held or (spoken and _is_spoken_of(name, found))
            yield f"{owner}.{name}", None if found is _UNKNOWN else is_there


def _reached_name(name: str, *, load: bool) -> Any:
    """The module, class or function of that name; a module that fails while it is loaded says nothing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        found = _loaded_module(".".join(parts[:length]), load=load)
        if found is not _GONE:
            return found if found is _UNKNOWN else _below(found, parts[length:], load=load)
    return _GONE


def _loaded_module(name: str, *, load: bool) -> Any:
    if not load:
        return sys.modules.get(name, _GONE)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        return _GONE if f"{name}.".startswith(f"{error.name}.") else _UNKNOWN
    except (ImportError, AttributeError):
        return _UNKNOWN


def _below(module: Any, parts: list[str], *, load: bool) -> Any:
    """What a module holds under these names; without `load` a part of a package may wait to be loaded.

    Dictionaries are asked, for PyTorch loads some modules when its packages are.
    """
    found = module
    for part in parts:
        if isinstance(found, ModuleType):
            held = vars(found).get(part, _GONE)
            waits = not load and hasattr(found, "__path__")
        else:
            held, waits = getattr(found, part, _GONE), False
        if held is _GONE:
            return _UNKNOWN if waits else _GONE
        found = held
    return found


def _is_spoken_of(name: str, owner: Any) -> bool:
    """Whether the source of a class, with its bases, or of a function has the name."""
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(re.search(rf"\b{name}\b", source) for source in map(_source, owners))


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # built in
        return ""

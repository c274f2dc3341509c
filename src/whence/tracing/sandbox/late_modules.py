"""Modules that a capture is the first to load: what they make while they are loaded is no part of it."""

import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from whence._torch.files import is_library
from whence.tracing.sandbox.module_snapshot import contains_fakes


@contextmanager
def late_modules_unloaded() -> Iterator[list[str]]:
    """Unload, after the block, the modules that were loaded in it and hold tensors of a capture, or something
    of those that do; gives their names then, in their order."""
    loaded, late = frozenset(sys.modules), list[str]()
    try:
        yield late
    finally:
        late += _late_modules(loaded)
        for name in late:
            del sys.modules[name]


def imported_again(names: Sequence[str], assumed: Any) -> Any:
    """Load such modules where no capture goes on; what an attempt takes for given stays."""
    for name in names:
        import_module(name)
    return assumed


def _late_modules(loaded: Set[str]) -> list[str]:
    if sys.modules.keys() <= loaded:  # as after nearly every capture
        return []
    new = {
        name: list(vars(module).values())
        for name, module in list(sys.modules.items())
        if name not in loaded and isinstance(module, ModuleType) and not is_library(name)
    }
    found = set[str]()
    late = {name for name, held in new.items() if any(map(contains_fakes, held))}
    while found < late:
        found = late
        late = found | {name for name, held in new.items() if not found.isdisjoint(map(_home, held))}
    return [name for name in new if name in late]


def _home(held: Any) -> str:
    """The module that something is, or was written in."""
    if isinstance(held, ModuleType):
        return held.__name__
    return str(held.__module__) if isinstance(held, FunctionType | type) else ""

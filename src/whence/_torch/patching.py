"""Put something in the place of an attribute of a class or a module of torch, for a while.

Such a patch is there for every thread, so what is on is known for the whole process: patches that two threads
put on each other may be taken off in any order, and one that an interrupt kept from being taken off is found.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_MISSING: Any = object()


@dataclass(eq=False)
class _Patch:
    """`before` is what the attribute was without this patch; it changes when a patch below is taken off."""

    owner: Any
    name: str
    value: Any
    before: Any = _MISSING
    thread: int = field(default_factory=threading.get_ident)


# A mirror of the patches that are on: like the attributes themselves, one for the process.
_on: list[_Patch] = []
_changing = threading.RLock()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` while the block runs, unless somebody else puts another thing there."""
    patch = _Patch(owner, name, value)
    try:
        _put_on(patch)
        yield
    finally:
        _take_off(patch)


def patches_undone() -> Callable[[], None]:
    """A way to take off what this thread will have patched from now on."""
    here, known = threading.get_ident(), set(_on)

    def undo() -> None:
        for patch in [patch for patch in reversed(_on) if patch.thread == here and patch not in known]:
            _take_off(patch)
        while _changing._is_owned():  # type: ignore[attr-defined]
            _changing.release()  # an interrupt came before its `with` could

    return undo


def _put_on(patch: _Patch) -> None:
    """Known before it is there, so that no moment leaves an unknown patch behind."""
    with _changing:
        patch.before = vars(patch.owner).get(patch.name, _MISSING)
        _on.append(patch)
        setattr(patch.owner, patch.name, patch.value)


def _take_off(patch: _Patch) -> None:
    """Safe to do again, and for a patch that never came to be."""
    with _changing:
        if patch not in _on:
            return
        if vars(patch.owner).get(patch.name) is patch.value:
            _give_back(patch)
        for above in [other for other in _on if _is_above(other, patch)]:
            above.before = patch.before
        _on.remove(patch)


def _is_above(other: _Patch, patch: _Patch) -> bool:
    return other.owner is patch.owner and other.name == patch.name and other.before is patch.value


def _give_back(patch: _Patch) -> None:
    if patch.before is _MISSING:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.before)

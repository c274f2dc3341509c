"""Put something in the place of an attribute of a class or a module of torch, for a while.

Such a patch is there for every thread, so what is on is known for the whole process: patches that two threads
put on each other may be taken off in any order, and one that an interrupt kept from being taken off is found.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch

BASES = "__bases__"
_OURS = f"{__name__.partition('.')[0]}."
_TRACER = inspect.unwrap(torch.fx.Tracer.trace).__code__.co_filename
_UNREAD, _WITHIN = "_torchdynamo_disable", "_torchdynamo_orig_callable"
ABSENT: Any = object()
"""What is put in the place of an attribute that shall not be there."""


@dataclass(eq=False)
class _Patch:
    """`before` is what the attribute was without this patch; it changes when a patch below is taken off.
    `loaded` is how many modules there were."""

    owner: Any
    name: str
    value: Any
    before: Any = ABSENT
    loaded: int = field(default_factory=lambda: len(sys.modules))
    thread: int = field(default_factory=threading.get_ident)


# A mirror of the patches that are on: like the attributes themselves, one for the process.
_on: list[_Patch] = []
# Those that somebody had patched when they were to be taken off, and may put back: `torch.fx` in a thread.
_left: list[_Patch] = []
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


def without_patches(value: Any) -> Any:
    """What was there before the patches that are on, of what an attribute holds now: those of ours, what
    `torch.fx` puts in the place of calls of modules while it traces, for all threads, and what keeps
    `torch.compile` from reading a function, as it does to PyTorch's optimizers when it is first used."""
    if _on or _left:  # seldom, and checks ask this of everything
        for patch in (*reversed(_on), *_left):
            if patch.value is value:
                value = patch.before
    if type(value) is not FunctionType or not (held := vars(value)):
        return value
    is_tracer_s = value.__code__.co_filename == _TRACER
    within = held.get("__wrapped__" if is_tracer_s else _WITHIN)
    is_around = within is not None and (is_tracer_s or _UNREAD in held)
    return without_patches(within) if is_around else value


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
        _take_off_left(patch.owner, patch.name)
        patch.before = _now(patch)
        _on.append(patch)
        _set(patch.owner, patch.name, patch.value)


def _take_off(patch: _Patch) -> None:
    """Safe to do again, and for a patch that never came to be."""
    with _changing:
        if patch not in _on:
            return
        position = _on.index(patch)
        above = [other for other in _on[position + 1 :] if _is_above(other, patch)]
        if _now(patch) is patch.value:
            _set(patch.owner, patch.name, patch.before)
        elif not above and type(patch.value) is FunctionType:
            _left.append(patch)
        if len(sys.modules) > patch.loaded and _is_own(patch.value):
            _give_back(patch)
        for other in above:
            other.before = patch.before
        del _on[position]


def _take_off_left(owner: Any, name: str) -> None:
    for patch in [patch for patch in _left if patch.owner is owner and patch.name == name]:
        if _now(patch) is patch.value:
            _set(owner, name, patch.before)
            _left.remove(patch)


def _is_own(value: Any) -> bool:
    return type(value) is FunctionType and str(value.__module__).startswith(_OURS)


def _give_back(patch: _Patch) -> None:
    """Modules that were loaded meanwhile may have taken what was there: `from random import choice`."""
    for module in list(islice(sys.modules.values(), patch.loaded, None)):
        if type(module) is ModuleType:
            for name in [name for name, held in [*vars(module).items()] if held is patch.value]:
                setattr(module, name, patch.before)


def _now(patch: _Patch) -> Any:
    """What is there; the bases of a class are in no table of it."""
    if patch.name == BASES:
        return patch.owner.__bases__
    return vars(patch.owner).get(patch.name, ABSENT)


def _is_above(other: _Patch, patch: _Patch) -> bool:
    return other.owner is patch.owner and other.name == patch.name and other.before is patch.value


def _set(owner: Any, name: str, value: Any) -> None:
    """Of a class, behind its metaclass: what that refuses, or does besides, is for attributes that stay."""
    plain: Any = type if isinstance(owner, type) else type(owner)
    if value is not ABSENT:
        plain.__setattr__(owner, name, value)
    elif name in vars(owner):
        plain.__delattr__(owner, name)

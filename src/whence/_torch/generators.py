"""See who moves the default random generators, torch's, Python's and NumPy's, on one thread.

Both are the process's: that a generator has moved says nothing about which thread moved it. torch's functions
reach theirs through a name in `torch.random`, those of Python and NumPy are bound to one object each.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from whence._torch.patching import patched

Kind = Literal["torch", "python", "numpy"]
Moving = Callable[[Kind], None]

_SETTERS = frozenset({"set_state", "manual_seed", "seed", "graphsafe_set_state"})
_REWINDING = (torch.utils.checkpoint.__file__, sys.modules["contextlib"].__file__)
"""Who sets the state in order to give it back: checkpoints, and `fork_rng`, which is entered by a `with`."""


class _Announcing:
    """Stands for the default generator where torch's own functions look for it."""

    def __init__(self, generator: torch.Generator, moving: Callable[[], None]) -> None:
        self._generator = generator
        self._moving = moving

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS and not _is_rewinding():
            self._moving()
        return getattr(self._generator, name)


def is_only_thread() -> bool:
    """Whether no other thread of the process runs Python."""
    return len(sys._current_frames()) == 1


def _is_rewinding() -> bool:
    """Whether torch's function was called, three frames from here, by code that only rewinds."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == torch.random.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename in _REWINDING


@contextmanager
def observed_generators(moving: Moving) -> Iterator[None]:
    """Report, before it happens, what moves a generator on this thread: a seed, a state, a draw in Python.

    Draws of torch are not reported: a recording draws nothing.
    """
    here = threading.get_ident()

    def announce(kind: Kind) -> None:
        if threading.get_ident() == here:
            moving(kind)

    with ExitStack() as patches:
        generator = _Announcing(torch.random.default_generator, lambda: announce("torch"))
        patches.enter_context(patched(torch.random, "default_generator", generator))
        for name, function in _functions_of_python():
            patches.enter_context(patched(random, name, _announced(function, lambda: announce("python"))))
        for name, function in _functions_of_numpy():
            announced = _announced(function, lambda: announce("numpy"))
            patches.enter_context(patched(sys.modules["numpy.random"], name, announced))
        yield


def _functions_of_python() -> list[tuple[str, Callable[..., Any]]]:
    """The functions of the module `random` that change the state of its generator."""
    generator = random.random.__self__  # type: ignore[attr-defined]
    bound = [(name, held) for name, held in vars(random).items() if callable(held)]
    return [
        (name, held)
        for name, held in bound
        if getattr(held, "__self__", None) is generator and name != "getstate"
    ]


def _functions_of_numpy() -> list[tuple[str, Callable[..., Any]]]:
    """The functions of `numpy.random` that change the state of its generator; none where it is not loaded."""
    loaded = sys.modules.get("numpy.random")
    if loaded is None:
        return []
    generator = loaded.get_state.__self__
    return [
        (name, held)
        for name, held in vars(loaded).items()
        if callable(held) and getattr(held, "__self__", None) is generator and name != "get_state"
    ]


def numpy_state() -> object:
    """The state of NumPy's default generator as one comparable value; None where NumPy is not loaded."""
    loaded = sys.modules.get("numpy.random")
    if loaded is None:
        return None
    name, keys, *rest = loaded.get_state()
    return name, keys.tobytes(), tuple(rest)


def set_numpy_state(state: Any) -> None:
    """Give NumPy's default generator a state that `numpy_state` has read."""
    if state is None:
        return
    loaded, numpy = sys.modules["numpy.random"], sys.modules["numpy"]
    name, keys, rest = state
    loaded.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _announced(function: Callable[..., Any], moving: Callable[[], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        moving()
        return function(*args, **kwargs)

    return announced

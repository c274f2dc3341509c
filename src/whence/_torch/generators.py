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
from torch import Tensor

from whence._torch.patching import patched

Kind = Literal["torch", "python", "numpy"]
Moving = Callable[[Kind], None]
Passing = Callable[[Tensor], None]

_SETTERS = frozenset({"set_state", "manual_seed", "seed", "graphsafe_set_state"})
_RANDOM = torch.random.__file__
_CHECKPOINT, _WITH = torch.utils.checkpoint.__file__, str(sys.modules["contextlib"].__file__)
"""Who sets the state in order to give it back: checkpoints, and `fork_rng`, which is entered by a `with`."""


class _Announcing:
    """Stands for the default generator where torch's own functions look for it."""

    def __init__(
        self, generator: torch.Generator, moving: Callable[[], None], read: Passing, back: Passing
    ) -> None:
        self._generator = generator
        self._moving = moving
        self._read = read
        self._back = back

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS and _caller() not in (_CHECKPOINT, _WITH):
            self._moving()
        return getattr(self._generator, name)

    def get_state(self) -> Tensor:
        state = self._generator.get_state()
        if _caller(_WITH) != _CHECKPOINT:
            self._read(state)
        return state

    @property
    def set_state(self) -> Callable[[Tensor], torch.Generator]:
        setter: Callable[[Tensor], torch.Generator] = self.__getattr__("set_state")
        return setter if _caller(_WITH) == _CHECKPOINT else self._given_back

    def _given_back(self, state: Tensor) -> torch.Generator:
        self._back(state)
        return self._generator.set_state(state)


def is_only_thread() -> bool:
    """Whether no other thread of the process runs Python."""
    return len(sys._current_frames()) == 1


def _caller(*passed_over: str) -> str:
    """The file that called torch's function: the first from here that is not torch's or ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, _RANDOM, *passed_over):
        frame = frame.f_back
    return frame.f_code.co_filename


@contextmanager
def observed_generators(
    moving: Moving, read: Passing = lambda _: None, back: Passing = lambda _: None
) -> Iterator[None]:
    """Report, before it happens, what moves a generator on this thread: a seed, a state, a draw in Python.

    Of torch's also which states are `read` and which are given `back`, but for those of checkpoints. Draws
    of torch are not reported: a recording draws nothing.
    """
    here = threading.get_ident()

    def announce(kind: Kind) -> None:
        if threading.get_ident() == here:
            moving(kind)

    with ExitStack() as patches:
        passing = [_on(here, read), _on(here, back)]
        generator = _Announcing(torch.random.default_generator, lambda: announce("torch"), *passing)
        patches.enter_context(patched(torch.random, "default_generator", generator))
        for name, function in _functions_of_python():
            patches.enter_context(patched(random, name, _announced(function, lambda: announce("python"))))
        for name, function in _functions_of_numpy():
            announced = _announced(function, lambda: announce("numpy"))
            patches.enter_context(patched(sys.modules["numpy.random"], name, announced))
        yield


def _on(thread: int, told: Passing) -> Passing:
    return lambda state: told(state) if threading.get_ident() == thread else None


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

"""What differs from run to run by itself: clocks, and random numbers that nobody can draw again."""

import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from whence._torch.observe.generators import SETTERS, default_generator_watched
from whence._torch.observe.threads import watched_threads
from whence._torch.patching import patched
from whence.dependence.snapshots import content_of_cell
from whence.errors import Fault, Place, SideEffect
from whence.tracing.reads.type_queries import ANSWERS

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_CALENDARS = ("localtime", "gmtime", "ctime", "asctime", "strftime")
_OF_TIME = (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_CALENDARS)
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in _OF_TIME),
    *((os, "urandom"), (random, "_urandom"), (uuid, "uuid1")),
)
_THROUGH = frozenset(
    (
        __file__,
        *(str(Path(os.__file__).with_name(f"{name}.py")) for name in ("os", "random", "uuid", "secrets")),
    )
)
"""Files whose functions ask on behalf of whoever calls them."""
_PYTHON_S = getattr(random.random, "__self__", random)
"""The generator whose methods `random` gives as functions."""
_CHECKERS = ("<@beartype(",)
"""Generated code that checks types, and draws which element of a container it looks at: nothing else follows
from that number."""


class ImpureCalls:
    """The calls of clocks and the like that the user's code makes on this thread, each with its line."""

    def __init__(self, is_user: Callable[[CodeType], bool], line: Callable[[], object]) -> None:
        self._is_user = is_user
        self._line = line
        self._here = threading.get_ident()
        self._called: dict[str, str | None] = {}
        self._announced: dict[int, tuple[Any, Any]] = {}
        self._clocks: dict[int, str] = {}
        self._names: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = []
        self._standing: set[int] = set()
        self._patches = ExitStack()
        self._is_deaf = False
        self._tells_settings: Callable[[], None] | None = None
        self._read: Callable[..., Any] = _nobody
        self._apart = random.Random(0)
        self.has_checked = False
        """Whether code that checks types has drawn, which no program does."""

    @contextmanager
    def watched(
        self, pairs: Iterable[tuple[Any, Any]], setting: Callable[[], None], read: Callable[..., Any]
    ) -> Iterator[None]:
        """Note calls inside the block, also by the names that `named` is told of. torch's generator, and what
        moves others, come in `pairs` with what stands for each under such names; where code holds torch's
        otherwise, `setting` is told. `read` gives what a call gives where every run makes it, or None."""
        self._read = read
        self._announced |= {id(pair[0]): pair for pair in pairs}
        with self._patches as patches:
            self._tells_settings = setting
            for owner, name in _FUNCTIONS:
                if (function := vars(owner).get(name)) is not None:
                    announced = self._announcing(function, f"{owner.__name__}.{name}", _always)
                    self._announced[id(function)] = function, announced
                    self._clocks[id(function)] = f"{owner.__name__}.{name}"
                    patches.enter_context(patched(owner, name, announced))
            seed = self._announcing(random.Random.seed, "random.Random", _is_seedless)
            patches.enter_context(patched(random.Random, "seed", seed))
            if (numpy := sys.modules.get("numpy.random")) is not None:
                made = self._announcing(vars(numpy)["default_rng"], "numpy.random.default_rng", _is_empty)
                patches.enter_context(patched(numpy, "default_rng", made))
                old = self._announcing(self._old_generator, "numpy.random.RandomState", _is_unseeded)
                self._put(numpy, "RandomState", _seeding(vars(numpy)["RandomState"], old))
            for owner in (torch, torch.utils.dlpack):
                self._put(owner, "to_dlpack", partial(self._handed_on, torch.to_dlpack))
            patches.callback(self.undo)
            yield

    @contextmanager
    def threads_refused(self, literals: Mapping[str, Tensor]) -> Iterator[None]:
        """Raises `SideEffect` after the block where another thread computed for this one: with a tensor of
        the run, or one of the `literals` that the run met."""
        refusing = _Refusing(literals)
        with refusing, watched_threads(lambda: partial(refusing.told, self._line())):
            yield

    def named(self, namespace: dict[str, Any], name: str) -> bool:
        """Whether a file has one of these under a name of its own; it is watched there, too."""
        return self._replaced(partial(namespace.get, name), partial(namespace.__setitem__, name))

    def closed_over(self, cell: CellType) -> bool:
        """Whether a function closes over one of these; it is watched there, too."""
        return self._replaced(partial(content_of_cell, cell), partial(setattr, cell, "cell_contents"))

    def checked(self, function: FunctionType) -> None:
        """Code is about to run; where it checks types, it draws from a generator that nobody else has."""
        held = function.__kwdefaults__ or {}
        if not function.__code__.co_filename.startswith(_CHECKERS):
            return
        for name, value in list(held.items()):
            if getattr(value, "__self__", None) is _PYTHON_S:
                drawing = partial(self._drawn_apart, value.__name__)
                self._put_name((partial(held.get, name), partial(held.__setitem__, name), value, drawing))
                held[name] = drawing

    def _drawn_apart(self, name: str, *args: Any) -> Any:
        self.has_checked = True
        return getattr(self._apart, name)(*args)

    def _replaced(self, now: Callable[[], Any], put: Callable[[Any], None]) -> bool:
        known = self._announced.get(id(now()))
        if known is None or known[0] is not now():
            return False
        self._put_name((now, put, *known))
        put(known[1])
        return True

    def answers_for(self, namespace: dict[str, Any], name: str) -> bool:
        """Whether a name in the code of a file is one of Python's that is answered as in eager mode."""
        answer = ANSWERS.get(name)
        if answer is None:
            return False
        if name not in namespace:
            namespace[name] = answer
            self._put_name((partial(namespace.get, name), lambda _: namespace.pop(name), None, answer))
        return namespace[name] is answer

    def is_put(self, value: object) -> bool:
        """Whether a value stands under a name for what was there, and will be again."""
        return id(value) in self._standing

    def _put_name(self, name: tuple[Callable[[], Any], Callable[[Any], None], Any, Any]) -> None:
        self._names.append(name)
        self._standing.add(id(name[-1]))

    def held(self, value: object) -> bool:
        """Whether a value is one of these that an object holds, where nothing can be put in its place: it is
        taken for called."""
        name = self._clocks.get(id(value))
        if name is not None:
            line = self._line()
            self._called.setdefault(name, None if line is None else str(line))
        return name is not None

    def spelled(self, names: Set[str]) -> None:
        """Code that is about to run has these names; where it may set a generator, it is watched closely."""
        if self._tells_settings is not None and not SETTERS.isdisjoint(names):
            tells, self._tells_settings = self._tells_settings, None
            self._patches.enter_context(
                default_generator_watched(lambda code: tells() if self._is_user(code) else None)
            )

    def undo(self) -> None:
        """Give the names back; harmless to do again."""
        for now, put, before, announced in self._names:
            if now() is announced:
                put(before)

    def end(self) -> None:
        """Hear nobody any more; who has a function that was put under a name has what was there."""
        self._is_deaf, self._tells_settings = True, None
        self._read = self._line = self._is_user = _nobody  # type: ignore[assignment]
        for held in (self._announced, self._names, self._clocks, self._standing):
            held.clear()

    def faults(self) -> list[Fault]:
        """What was called, one fault each."""
        return [other_each_time(name, line) for name, line in self._called.items()]

    def _put(self, owner: Any, name: str, value: Any) -> None:
        """Have a value there, and under the names that files have for what is there."""
        held = vars(owner)[name]
        self._announced.setdefault(id(held), (held, value))
        self._patches.enter_context(patched(owner, name, value))

    def _old_generator(self, made: Any, *args: Any, **kwargs: Any) -> Any:
        """One of NumPy's old generators; it draws numbers to begin with, also where a seed replaces them."""
        before, self._is_deaf = self._is_deaf, threading.get_ident() == self._here or self._is_deaf
        try:
            return made(*args, **kwargs)
        finally:
            self._is_deaf = before

    def _handed_on(self, hand_on: Callable[[Tensor], Any], tensor: Any) -> Any:
        """As the method does, which is a torch function and as such refused: the function is none."""
        is_here = threading.get_ident() == self._here and isinstance(tensor, Tensor)
        return tensor.__dlpack__() if is_here else hand_on(tensor)

    def _announcing(self, function: Any, name: str, counts: Callable[..., bool]) -> Callable[..., Any]:
        def announced(*args: Any, **kwargs: Any) -> Any:
            if (
                counts(*args, **kwargs)
                and threading.get_ident() == self._here
                and not self._is_deaf
                and self._is_asked(sys._getframe(1))
            ):
                if (found := self._read(name, function, args, kwargs)) is not None:
                    return found
                line = self._line()
                self._called.setdefault(name, None if line is None else str(line))
            return function(*args, **kwargs)

        return announced

    def _is_asked(self, frame: FrameType | None) -> bool:
        """Whether code of the user asks: itself, or through a function that makes random numbers."""
        while frame is not None and frame.f_code.co_filename in _THROUGH:
            frame = frame.f_back
        return frame is not None and self._is_user(frame.f_code)


class _Seeding(type):
    """A class in the place of another, whose instances are those of the other."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, cls.__base__)  # type: ignore[arg-type]


def _seeding(held: Any, make: Callable[..., Any]) -> Any:
    """What makes instances of a class as `make` does."""

    def new(_kind: object, *args: Any, **kwargs: Any) -> Any:
        return make(held, *args, **kwargs)

    return _Seeding(held.__name__, (held,), {"__new__": new, "__module__": held.__module__})


class _Refusing(AbstractContextManager[None]):
    """Refuses what other threads computed for the run, also where an error came of it."""

    def __init__(self, literals: Mapping[str, Tensor]) -> None:
        self._literals = literals
        self._used: list[object] = []
        self._made: dict[int, tuple[Tensor, object]] = {}

    def told(self, line: object, made: Tensor | None) -> None:
        """Another thread, started at a line, takes a tensor of the run, or has made one of its own."""
        if made is None:
            self._used.append(line)
        else:
            self._made[id(made)] = made, line

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        met = [self._made[id(row)][1] for row in self._literals.values() if id(row) in self._made]
        used = [*self._used, *met]
        if not used or not isinstance(error, Exception | None):
            return
        line = used[0]
        raise SideEffect(
            "the model computes in another thread",
            where=Place(line=None if line is None else str(line)),
            why="a capture records one thread; what others compute would be a constant, or missing",
            remedy="compute in the thread that calls the model: map(f, xs) in the place of pool.map(f, xs)",
        ) from error


def _nobody(*_call: object) -> None:
    return None


def _always(*_args: object, **_kwargs: object) -> bool:
    return True


def _is_empty(*args: object, **kwargs: object) -> bool:
    return all(value is None for value in (*args, *kwargs.values()))


def _is_unseeded(_class: object, *args: object, **kwargs: object) -> bool:
    return _is_empty(*args, **kwargs)


def _is_seedless(_generator: object, *args: object, **kwargs: object) -> bool:
    return all(value is None for value in (*args[:1], kwargs.get("a")))


def other_each_time(name: str, line: str | None) -> Fault:
    """The fault of a model that asks what is different in every run."""
    return Fault(
        f"the model calls {name}() while it runs",
        where=Place(line=line),
        why="what it returns is another in every run, and would be a constant of the program",
        remedy="call it before or after, outside of what is captured, and pass in what it returns if that is "
        'needed there; draw with torch\'s generator; with decide="example" every run looks at a clock',
    )

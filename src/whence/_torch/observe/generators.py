"""See who moves the default random generators, torch's, Python's and NumPy's, on one thread.

Both are the process's: that a generator has moved says nothing about which thread moved it. torch's functions
reach theirs through a name in `torch.random`, those of Python and NumPy are bound to one object each.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Literal, Protocol

import torch

from whence._torch.function_tracer import beside
from whence._torch.patching import ABSENT, patched
from whence._torch.tensors import generator_state, set_generator_state

Kind = Literal["torch", "python", "numpy"]
Moving = Callable[[Kind], None]
Drawing = Callable[[Kind, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function that moves a generator of Python's or NumPy's, told of by its kind and name."""

DEFAULT = torch.default_generator
"""Torch's own, whatever stands for it while a model is watched."""
SETTERS = frozenset({"set_state", "manual_seed", "seed", "graphsafe_set_state"})
"""Methods of a generator that set its state."""
_READERS = frozenset({"get_state", "graphsafe_get_state", "clone_state"})
_DEVICE_FUNCTIONS = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all")
_REWINDING = torch.utils.checkpoint.__file__
"""Who sets the state in order to give it back, and repeats what was drawn."""
_ON_THE_WAY = (__file__, torch.random.__file__, sys.modules["contextlib"].__file__)
"""What leads from the code that sets a state to the generator: `fork_rng` is entered by a `with`."""


_COMPILER = f"{os.sep}trace_rules.py"
"""Where PyTorch's compiler looks methods up, to know them when it meets them; it calls none."""


class GeneratorListener(Protocol):
    """What is told of torch's default generators, that of the accelerator included."""

    def state_read(self, state: object) -> None:
        """The model has read the state of one of them."""

    def state_set(self, device: str, state: object) -> None:
        """The model sets the state of one; `state` may be one that it has read, or a seed."""

    def seed_read(self) -> None:
        """The model asks for the number that the generator was seeded with."""


class _Announcing(torch.Generator):
    """Stands for the default generator where the model looks for it; its own numbers are never drawn.

    It is a generator, so that it may be passed to an operator, which the recording sees.
    """

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if sys._getframe(1).f_code.co_filename.endswith(_COMPILER):
            return getattr(DEFAULT, name)
        return vars(self)["observed"].found(name)


@dataclass(frozen=True)
class _Observed:
    """The default generators as a listener has them observed on one thread."""

    moving: Moving
    told: GeneratorListener
    thread: int = field(default_factory=threading.get_ident)

    def is_told(self) -> bool:
        """Whether what happens now is the model's: other threads and checkpoints do as they please."""
        return threading.get_ident() == self.thread and not _is_rewinding()

    def found(self, name: str) -> Any:
        """An attribute of torch's default generator."""
        held = getattr(DEFAULT, name)
        if not self.is_told():
            return held
        if name in SETTERS:
            return self.setting(held, "cpu")
        if name in _READERS:
            return self.reading(held)
        return self.asking(held) if name == "initial_seed" else held

    def asking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that gives the seed, and says so."""

        def announced() -> Any:
            self.told.seed_read()
            return function()

        return announced

    def setting(self, function: Callable[..., Any], device: str) -> Callable[..., Any]:
        """A function that sets a generator, and says so."""

        def announced(*args: Any, **kwargs: Any) -> Any:
            self.told.state_set(device, next(iter((*args, *kwargs.values())), None))
            self.moving("torch")
            return function(*args, **kwargs)

        return announced

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reads a state, and says so."""

        def announced(*args: Any, **kwargs: Any) -> Any:
            state = function(*args, **kwargs)
            self.told.state_read(state)
            return state

        return announced

    def on_device(self, function: Callable[..., Any], name: str, device: str) -> Callable[..., Any]:
        """A function of the accelerator's; one that sets its generator says so, and leaves it as it is."""

        def announced(*args: Any, **kwargs: Any) -> Any:
            if not self.is_told():
                return function(*args, **kwargs)
            if name == "get_rng_state":
                return self.reading(function)(*args, **kwargs)
            return self.setting(_draw_nothing, device)(*args, **kwargs)

        return announced


def _draw_nothing(*_args: object, **_kwargs: object) -> None:
    """What is done to the generator of an accelerator while a recording draws nothing."""


def is_only_thread() -> bool:
    """Whether no other thread of the process runs Python."""
    return len(sys._current_frames()) == 1


def _is_rewinding() -> bool:
    """Whether torch's function was called by code that gives states back to repeat what was drawn."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _ON_THE_WAY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _REWINDING


@contextmanager
def observed_generators(
    moving: Moving, told: GeneratorListener, drawing: Drawing
) -> Iterator[list[tuple[object, object]]]:
    """Report, before it happens, what sets torch's generator on this thread, and to `told` what the model
    does to its states. `drawing` is called in the place of functions of Python's and NumPy's.

    Draws of torch are not reported: a recording draws nothing. Gives torch's generator and those functions,
    each with what stands for it, to files that hold one under a name of their own.
    """
    observed = _Observed(moving, told)
    generator = _Announcing()
    vars(generator)["observed"] = observed
    with ExitStack() as patches:
        patches.enter_context(patched(torch.random, "default_generator", generator))
        patches.enter_context(_found_by_thread(torch, "default_generator", generator))
        for owner, name, function in _functions_of_device():
            announced = observed.on_device(function, name, owner.__name__.split(".")[1])
            patches.enter_context(patched(owner, name, announced))
        pairs: list[tuple[object, object]] = [(DEFAULT, generator)]
        for kind, owner, functions in _drawing_functions():
            for name, function in functions:
                announced = _announced(function, partial(drawing, kind, name, function))
                patches.enter_context(patched(owner, name, announced))
                pairs.append((function, announced))
        yield pairs


@contextmanager
def _found_by_thread(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """This thread finds `value` under a name of a module; the others find what is there."""
    thread = threading.get_ident
    here, held, before = thread(), getattr(module, name), vars(module)["__getattr__"]

    def lookup(wanted: str) -> Any:
        if wanted != name:
            return before(wanted)
        return value if thread() == here else held

    # torch hides what it warns of by the module that asks, which is the one whose variables a function has
    its_own = FunctionType(lookup.__code__, vars(module), lookup.__name__, None, lookup.__closure__)
    with patched(module, "__getattr__", its_own), patched(module, name, ABSENT):
        yield


@contextmanager
def default_generator_watched(setting: Callable[[CodeType], None]) -> Iterator[None]:
    """Tell, before it happens, of code on this thread that sets torch's default generator, however it came by
    the object.

    Its methods are C's, and the object may be held anywhere: only the interpreter sees who calls them, by the
    hook that profilers use. Where a profiler runs, nothing is told.
    """
    if sys.getprofile() is not None:
        yield
        return

    def profile(frame: FrameType, event: str, called: Any) -> None:
        is_setter = event == "c_call" and called.__name__ in SETTERS
        if is_setter and _is_default(getattr(called, "__self__", None)):
            setting(frame.f_code)

    with beside("profile", profile):
        yield


def without_default_generator(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator, which draws from torch's default generator where it is given none."""
    kept = {name: None if _is_default(value) else value for name, value in kwargs.items()}
    return tuple(None if _is_default(value) else value for value in args), kept


def _is_default(value: object) -> bool:
    """Whether a value is torch's default generator, or stands for it; operators see them in other clothes."""
    if not isinstance(value, torch.Generator):
        return False
    return _generator_identity(value) in map(_generator_identity, (DEFAULT, torch.random.default_generator))


def _generator_identity(generator: object) -> Any:
    """The same for every Python object that stands for one generator; asked past what stands in its place."""
    return object.__getattribute__(generator, "_cdata")


def _functions_of_device() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """The functions that set and read the state of the accelerator there is, where they are looked up."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return []
    held = torch.get_device_module(device)
    functions = [(name, getattr(held, name)) for name in _DEVICE_FUNCTIONS if hasattr(held, name)]
    found = ((sys.modules[function.__module__], name, function) for name, function in functions)
    return [*found, *((held, name, function) for name, function in functions)]


def _drawing_functions() -> list[tuple[Kind, ModuleType, list[tuple[str, Callable[..., Any]]]]]:
    """What moves the generators of Python and NumPy, each with the module that it is found in."""
    numpy = sys.modules.get("numpy.random")
    found: list[tuple[Kind, ModuleType, list[tuple[str, Callable[..., Any]]]]] = []
    found.append(("python", random, _functions_moving(random, "getstate")))
    return found if numpy is None else [*found, ("numpy", numpy, _functions_moving(numpy, "get_state"))]


def _functions_moving(module: ModuleType, reader: str) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of a module that change the state of the generator which its `reader` reads."""
    generator = getattr(module, reader).__self__
    return [
        (name, held)
        for name, held in vars(module).items()
        if callable(held) and getattr(held, "__self__", None) is generator and name != reader
    ]


def is_default_generator(thing: object) -> bool:
    """Whether a thing is the generator behind the functions of `random`, or of `numpy.random`."""
    numpy = sys.modules.get("numpy.random")
    held = [random.getstate, *([] if numpy is None else [numpy.get_state])]
    return any(thing is function.__self__ for function in held)


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


def states() -> dict[Kind, object]:
    """Where the generators are, each as one comparable value."""
    return {kind: read() for kind, read in READERS.items()}


def set_states(states: Mapping[Kind, object]) -> None:
    """Put generators where they were."""
    for kind, state in states.items():
        WRITERS[kind](state)


def seed_all(seed: int) -> None:
    """Have all of them draw the same from here on."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed)


READERS: Mapping[Kind, Callable[[], Any]] = MappingProxyType(
    {"python": random.getstate, "numpy": numpy_state, "torch": generator_state}
)
WRITERS: Mapping[Kind, Callable[[Any], None]] = MappingProxyType(
    {"python": random.setstate, "numpy": set_numpy_state, "torch": set_generator_state}
)


def _announced(function: Callable[..., Any], drawing: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    def announced(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return function(*args, **kwargs)
        return drawing(args, kwargs)

    return announced

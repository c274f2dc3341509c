"""See every attribute that modules, and objects reached from them, are asked for on one thread.

Python looks attributes up through `__getattribute__` of the class. `nn.Module` has none of its own, so one is
put there while a capture runs; a class that has its own gets a wrapper around it. Parameters, buffers and
submodules live behind `Module.__getattr__`, which is wrapped too. Other threads pay for one comparison.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, Protocol

from torch import nn

from whence._torch.files import TORCH, WHENCE, is_standard_library
from whence._torch.function_tracer import untold
from whence._torch.observe.hooks import HOOK_FLAGS, HOOK_KINDS
from whence._torch.patching import patched

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what is found through `Module.__getattr__`."""
NOTHING: Any = object()
"""What a lookup gives that finds nothing; None is a value."""
_STRUCTURE = frozenset(TABLES)

_PLUMBING = frozenset(
    {
        *(
            "__dict__",
            "__class__",
            "_call_impl",
            "_wrapped_call_impl",
            "_compiled_call_impl",
            "_slow_forward",
        ),
        *(*HOOK_KINDS, *(flag for flags in HOOK_FLAGS.values() for flag in flags)),
        *("_is_full_backward_hook", "_non_persistent_buffers_set", "_get_name", "_get_backward_hooks"),
        *("_get_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"),
    }
)
"""Names that Module's own machinery reads in every call: hooks are guarded whether read or not."""

_RECORDING = tuple(f"{WHENCE}{room}{os.sep}" for room in ("tracing", "dependence"))
"""Where whence's own code looks at modules while it records them."""

_INFRASTRUCTURE = (TORCH, WHENCE)

_MODULE_FILE = nn.Module.__call__.__code__.co_filename
_LOOKUPS = frozenset({"__getattr__", "__setattr__", "__delattr__", "_call_impl", "register_buffer"})

_NOT_THE_USERS = frozenset({"torch", "whence", "builtins", "_thread"})

_WITH_SETTINGS = ("torch.optim", "torch.amp", "torch.utils.data", "torch.utils.weak")
"""Packages of torch's in whose objects people keep settings and data, as they do in their own."""


class ReadListener(Protocol):
    """What is told about attributes that were read."""

    def read(self, holder: object, name: str, value: object) -> bool:
        """`holder.name` was looked up and found; False for a holder of no interest."""

    def missing(self, holder: object, name: str) -> bool:
        """`holder.name` was looked up and not found; False for a holder of no interest."""


class ReadObserver:
    """Reports attribute reads of the calling thread to a listener, first reads only."""

    def __init__(self, listener: ReadListener) -> None:
        self._listener = listener
        self._thread = threading.get_ident()
        self._seen: set[tuple[int, str]] = set()
        self._classes: set[type] = set()
        self._patches = ExitStack()
        self._is_over = False
        self.is_torch_reading = False

    @contextmanager
    def active(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Observe modules while the block runs; classes with a `__getattribute__` of their own as well."""
        kinds = {type(module) for module in modules}
        with self._patches:
            self._observe(nn.Module)
            getattr_observed = self._observed_getattr(nn.Module.__getattr__)
            self._patches.enter_context(patched(nn.Module, "__getattr__", getattr_observed))
            for kind in kinds:
                if kind.__getattribute__ is not nn.Module.__getattribute__:
                    self._observe(kind)
            try:
                yield
            finally:
                self._is_over = True

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Report reads inside the block although they were reported before."""
        before = set(self._seen)
        self._seen.clear()
        try:
            yield
        finally:
            self._seen |= before

    def observe_class_of(self, value: object) -> bool:
        """Observe objects of this class too, from now on; False for a class that cannot be observed."""
        kind = type(value)
        if kind in self._classes:
            return True
        if not (is_observable(kind) or holds_settings(kind)):
            return False
        self._observe(kind)
        return True

    def _observe(self, kind: type) -> None:
        self._classes.add(kind)
        lookup: Any = kind.__getattribute__
        later: Any = getattr(kind, "__getattr__", None)
        observed = self._observed_lookup(lookup) if later else self._observed_last_lookup(lookup)
        self._patches.enter_context(patched(kind, "__getattribute__", observed))
        if later is not None and kind is not nn.Module and not issubclass(kind, nn.Module):
            self._patches.enter_context(patched(kind, "__getattr__", self._observed_getattr(later)))

    def _observed_lookup(
        self, lookup: Callable[[Any, str], Any], *, around: int = 0
    ) -> Callable[[Any, str], Any]:
        """A lookup that tells, with as many frames of ours between it and who asks."""
        thread, seen, identify = self._thread, self._seen, threading.get_ident

        def observed(holder: Any, name: str) -> Any:
            value = lookup(holder, name)
            if (id(holder), name) not in seen and identify() == thread:
                self._note(holder, name, value, sys._getframe(1 + around).f_code)
            return value

        return observed

    def _observed_last_lookup(self, lookup: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """For a class without `__getattr__`: what is not found here is not there."""
        found = self._observed_lookup(lookup, around=1)
        thread, seen, identify = self._thread, self._seen, threading.get_ident

        def observed(holder: Any, name: str) -> Any:
            try:
                return found(holder, name)
            except AttributeError:
                if (id(holder), name) not in seen and identify() == thread:
                    self._tell(self._listener.missing, holder, name)
                raise

        return observed

    def _observed_getattr(self, lookup: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        thread, seen, identify = self._thread, self._seen, threading.get_ident

        def observed(module: Any, name: str) -> Any:
            try:
                value = lookup(module, name)
            except AttributeError:
                if (id(module), name) not in seen and identify() == thread:
                    self._tell(self._listener.missing, module, name)
                raise
            if (id(module), name) not in seen and identify() == thread:
                self._tell(self._listener.read, module, name, value)
            return value

        return observed

    def _note(self, holder: object, name: str, value: object, reader: CodeType) -> None:
        if reader.co_filename.startswith(_RECORDING):
            return
        if name in _STRUCTURE:
            if reader.co_filename == _MODULE_FILE and reader.co_name in _LOOKUPS:
                return
        elif name in _PLUMBING and (name != "__dict__" or _is_on_its_way(reader)):
            return
        self.is_torch_reading = reader.co_filename.startswith(TORCH)
        self._tell(self._listener.read, holder, name, value)

    def _tell(self, told: Callable[..., bool], holder: object, name: str, *value: object) -> None:
        """Tell the listener once; it keeps what it notes alive, so that its identity stays its own.

        While it is told it may look at the holder itself. Whoever patched a patch of ours, as `torch.fx` does
        in another thread, may put it back when nobody listens any more.
        """
        if self._is_over:
            return
        self._seen.add((id(holder), name))
        if not untold(told, holder, name, *value):
            self._seen.discard((id(holder), name))


def has_attributes(thing: object) -> bool:
    """Whether a thing holds attributes in a dictionary, looked at without asking it."""
    try:
        object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return False
    return True


def own_attributes(thing: object) -> dict[str, Any]:
    """The attributes that a thing holds itself, looked at without asking it; some things have none."""
    try:
        held: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return held


def class_attribute(kind: type, name: str) -> Any:
    """The attribute as a class or one of its bases spells it, unbound; `NOTHING` where none does."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return NOTHING


def is_observable(kind: type) -> bool:
    """Whether a class is Python's own work of a user: not built in, and not one of torch's or ours."""
    return is_mutable(kind) and kind.__module__.partition(".")[0] not in _NOT_THE_USERS


def holds_settings(kind: type) -> bool:
    """Whether objects of a class of torch's are looked at as those of a user's are: optimizers, data sets."""
    return is_mutable(kind) and kind.__module__.startswith(_WITH_SETTINGS)


def is_mutable(kind: type) -> bool:
    """Whether a class is written in Python, and attributes can be put on it; Cython's say of which file each
    of their objects is."""
    is_made = bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE
    return is_made and isinstance(kind.__module__, str)


def _is_on_its_way(code: CodeType) -> bool:
    """Whether code that asks for `__dict__` looks for one attribute, and not for what all is there."""
    return code.co_filename.startswith(_INFRASTRUCTURE) or is_standard_library(code.co_filename)

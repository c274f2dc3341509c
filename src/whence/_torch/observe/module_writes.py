"""See who sets attributes of modules, and who registers hooks on them, on one thread.

Both go through `nn.Module`, whatever class the module is of.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn

from whence._torch.patching import patched

_REGISTERING = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


class WriteObserver(Protocol):
    """What is told about changes of modules."""

    def attribute_set(self, module: nn.Module, name: str) -> None:
        """The attribute `name` of `module` has been set."""

    def module_hook_registered(self) -> None:
        """A hook has been put on a module."""


@contextmanager
def observed_writes(observer: WriteObserver) -> Iterator[None]:
    """Report attributes that are set and hooks that are registered on the calling thread."""
    here = threading.get_ident()
    before: dict[str, Any] = {name: vars(nn.Module)[name] for name in ("__setattr__", *_REGISTERING)}

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        before["__setattr__"](module, name, value)
        if threading.get_ident() == here:
            observer.attribute_set(module, name)

    def registering(register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                observer.module_hook_registered()
            return register(module, *args, **kwargs)

        return registered

    changed: dict[str, Any] = {name: registering(before[name]) for name in _REGISTERING}
    changed["__setattr__"] = set_attribute
    with ExitStack() as patches:
        for name, function in changed.items():
            patches.enter_context(patched(nn.Module, name, function))
        yield

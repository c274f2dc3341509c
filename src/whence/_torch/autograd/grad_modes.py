"""Follow what a model does to the grad mode on one thread, also where that is off already.

Where a capture runs without gradients, `torch.is_grad_enabled()` says nothing about what the model wants: its
`no_grad` changes nothing. The contexts are classes of Python's, which are looked at when they are entered.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from whence._torch.patching import patched

_CONTEXTS: dict[type, Callable[[Any], bool]] = {
    torch.no_grad: lambda _: False,
    torch.enable_grad: lambda _: True,
    torch.set_grad_enabled: lambda context: bool(context.mode),
    torch.inference_mode: lambda context: not context.mode,
}
"""What may be entered, and whether gradients are recorded inside."""
_TRANSFORMS = torch.func.vjp.__code__.co_filename
"""Where `torch.func` turns gradients on for its own level: around that they are what they were."""


@dataclass
class GradModes:
    """The modes that were set and not given back yet, the innermost last.

    `records` is the mode that the model is called in, and `infers` whether that is inference mode. One that
    it sets is None where it has asked for that, which is then `given_back`. `begun` is how many there were
    when a context began, which `set_grad_enabled` does when it is made.
    """

    records: bool = field(default_factory=torch.is_grad_enabled)
    infers: bool = field(default_factory=torch.is_inference_mode_enabled)
    modes: list[bool | None] = field(default_factory=list)
    given_back: bool = False
    begun: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_off(self) -> bool:
        """Whether the model itself has turned gradients off here."""
        return self.modes[-1:] == [False]

    @property
    def is_on(self) -> bool:
        """Whether the model itself has turned gradients on here, also for a caller who turned them off."""
        return self.modes[-1:] == [True]

    def give_back(self) -> None:
        """The model has asked for the mode, and sets it again next."""
        self.given_back = True

    def begins(self, kind: type, name: str) -> Callable[..., Any]:
        """What makes or enters a context, and notes its mode."""
        before: Any = vars(kind)[name]

        def begin(context: Any, *args: Any, **kwargs: Any) -> Any:
            depth = self.begun.get(context, len(self.modes)) if name == "__enter__" else len(self.modes)
            forward_mode = torch._C._is_fwd_grad_enabled()
            result = before(context, *args, **kwargs)
            if threading.get_ident() == self.thread:
                torch._C._set_fwd_grad_enabled(forward_mode)
                is_entered = context in self.begun and self.modes[depth : depth + 1] == [None]
                is_asked = is_entered or self.given_back
                self.given_back = False
                mode = None if is_asked else _CONTEXTS[kind](context)
                of_transform = sys._getframe(1).f_code.co_filename == _TRANSFORMS
                self.modes[depth:] = self.modes[depth - 1 : depth] if of_transform else [mode]
                self.begun[context] = depth
            return result

        return begin

    def ends(self, kind: type, name: str) -> Callable[..., Any]:
        """What leaves a context, or decorates a function by it, and forgets what was set inside."""
        before: Any = vars(kind)[name]

        def end(context: Any, *args: Any) -> Any:
            result = before(context, *args)
            if threading.get_ident() == self.thread:
                del self.modes[self.begun.pop(context, len(self.modes)) :]
            return result

        return end


@contextmanager
def observed_grad_modes(modes: GradModes) -> Iterator[None]:
    """Note in `modes` what this thread does inside the block.

    There inference mode leaves gradients in forward mode on: where they are off, a custom function runs.
    """
    with ExitStack() as patches:
        patches.callback(torch._C._set_fwd_grad_enabled, torch._C._is_fwd_grad_enabled())
        torch._C._set_fwd_grad_enabled(True)
        for kind in _CONTEXTS:
            patches.enter_context(patched(kind, "__enter__", modes.begins(kind, "__enter__")))
            patches.enter_context(patched(kind, "__exit__", modes.ends(kind, "__exit__")))
        made = modes.begins(torch.set_grad_enabled, "__init__")
        patches.enter_context(patched(torch.set_grad_enabled, "__init__", made))
        decorates = modes.ends(torch.set_grad_enabled, "__call__")
        patches.enter_context(patched(torch.set_grad_enabled, "__call__", decorates))
        yield

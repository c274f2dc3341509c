"""See what changes a derivative and is no operation: hooks on autograd's nodes, custom functions that write
in place, dispatch modes of the model's own, which run below autograd.

Where the tensor that a custom function writes is a view, no list of autograd's nodes has the function.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.files import WHENCE, hook_in_words, is_library
from whence._torch.patching import patched


@contextmanager
def observed_derivatives(lost: Callable[[str], None]) -> Iterator[None]:
    """On the calling thread, say in words what a graph of operations has no trace of."""
    here = threading.get_ident()
    register: Any = Function._register_hook
    mark_dirty, enter = FunctionCtx.mark_dirty, TorchDispatchMode.__enter__

    def tell(what: str, *, is_so: bool) -> None:
        if is_so and threading.get_ident() == here:
            lost(what)

    def hooked(hooks: Any, hook: Any) -> Any:
        is_ours = sys._getframe(1).f_code.co_filename.startswith(WHENCE)
        tell(f"the hook {hook_in_words(hook)} on what autograd recorded", is_so=not is_ours)
        return register(hooks, hook)

    def marked(context: Any, *tensors: Any) -> None:
        name = context.name().removesuffix("Backward")
        tell(f"the custom autograd function {name}", is_so=any(context.needs_input_grad))
        mark_dirty(context, *tensors)

    def entered(mode: TorchDispatchMode) -> Any:
        kind = type(mode)
        tell(f"the dispatch mode {kind.__qualname__}", is_so=not is_library(kind.__module__))
        return enter(mode)

    with ExitStack() as patches:
        patches.enter_context(patched(Function, "_register_hook", staticmethod(hooked)))
        patches.enter_context(patched(FunctionCtx, "mark_dirty", marked))
        patches.enter_context(patched(TorchDispatchMode, "__enter__", entered))
        yield

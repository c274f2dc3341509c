"""Where `torch.cond` and its like, called in eager mode, compile the call of themselves.

Since PyTorch 2.13 one function does it. Before, each did it on its own, with the backend that
`setup_compilation_env` gave.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._higher_order_ops import utils

from whence._torch.patching import patched

_ONE_FUNCTION: Any = getattr(utils, "_hop_compile_and_call", None)


def operators_uncompiled() -> AbstractContextManager[None]:
    """Inside the block, where compiled functions run their Python, operators here are just called."""
    return _called() if _ONE_FUNCTION is not None else _prepared()


@contextmanager
def _called() -> Iterator[None]:
    here, compile_and_call = threading.get_ident(), utils._hop_compile_and_call

    def called(function: Any, args: Any, kwargs: Any = None) -> Any:
        if threading.get_ident() != here:
            return compile_and_call(function, args, kwargs)
        return function(*args, **(kwargs or {}))

    with patched(utils, "_hop_compile_and_call", called):
        yield


@contextmanager
def _prepared() -> Iterator[None]:
    """Modes stay where the operator is called, and nothing says that an operator is being compiled."""
    here, prepare = threading.get_ident(), utils.setup_compilation_env

    @contextmanager
    def prepared() -> Iterator[Any]:
        if threading.get_ident() == here:
            yield "eager"
            return
        with prepare() as backend:
            yield backend

    with patched(utils, "setup_compilation_env", prepared):
        yield

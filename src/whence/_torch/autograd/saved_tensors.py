"""See when autograd packs a tensor that it saves: `torch.autograd.graph.saved_tensors_hooks`.

C++ calls the pack hook in the middle of an operation, so no frame tells that it is one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from whence._torch.files import TORCH
from whence._torch.patching import patched

Packing = Callable[[str, bool], AbstractContextManager[None]]
"""What is entered around a pack hook, by its name; and whether it is torch's own, that changes nothing."""


def packs_what_is_saved() -> bool:
    """Whether hooks are told of the tensors that autograd saves: a checkpoint is recording, or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def observed_packing(packing: Packing, made: Callable[[], None]) -> Iterator[None]:
    """On the calling thread, run pack hooks that are made inside the block in a context, by their name.

    That they are `made` is told, too: without gradients nothing is saved that they could be run on.
    """
    here = threading.get_ident()
    hooks_class: Any = saved_tensors_hooks
    before = hooks_class.__init__

    def init(hooks: saved_tensors_hooks, pack_hook: Any, unpack_hook: Any) -> None:
        before(hooks, _observed(pack_hook, packing, here), unpack_hook)
        if threading.get_ident() == here:
            made()

    with patched(hooks_class, "__init__", init):
        yield


def _observed(pack_hook: Any, packing: Packing, thread: int) -> Any:
    name = getattr(pack_hook, "__qualname__", type(pack_hook).__name__)
    is_torchs = getattr(getattr(pack_hook, "__code__", None), "co_filename", "").startswith(TORCH)

    def pack(tensor: Any) -> Any:
        if threading.get_ident() != thread:
            return pack_hook(tensor)
        with packing(name, is_torchs):
            return pack_hook(tensor)

    pack.__dict__.update(getattr(pack_hook, "__dict__", {}))  # where torch says that it is a checkpoint's
    return pack

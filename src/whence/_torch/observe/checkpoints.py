"""See where checkpoints begin, and when they run their region again.

`torch.utils.checkpoint` has no hook for this. Its frame object is made when the region starts and calls the
function it is given when the backward needs the region again; wrapping that function is the only handle.
Under a tracer a selective checkpoint would keep everything, and leave its policy to a compiler; it is told
that it runs in eager mode, and its policy is put on the nodes all the same.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch.utils.checkpoint
from torch import fx
from torch.autograd.graph import Node
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    _CheckpointFrame,
)

from whence._torch.function_tracer import code_running
from whence._torch.patching import patched

POLICY = "recompute"
"""Where a compiler looks for the policy of a checkpoint, in what is noted of a node."""

_REGION = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_OF_TRUTH = {True: CheckpointPolicy.MUST_SAVE, False: CheckpointPolicy.PREFER_RECOMPUTE}


class CheckpointObserver(Protocol):
    """What is told about checkpoints."""

    def checkpoint_starts(self, rewinds: bool) -> Callable[[], AbstractContextManager[None]]:
        """A checkpointed region begins; the result is entered around every recomputation of it.

        `rewinds` says whether the random number generator is rewound for a recomputation.
        """


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether an autograd node is a checkpoint of the older kind, a custom function."""
    return type(node).__name__ == f"{CheckpointFunction.__name__}Backward"


def is_in_checkpoint() -> bool:
    """Whether the calling thread computes the region of a checkpoint for the first time."""
    return any(code is _REGION for code in code_running())


@contextmanager
def checkpoints_as_in_eager(graph: fx.Graph) -> Iterator[None]:
    """Selective checkpoints of the calling thread keep what they keep in eager mode, and compute the rest
    again; the nodes of `graph` get what their policy says of each operation."""
    here = threading.get_ident()
    asked, before = torch.utils.checkpoint._is_compiling, _CachingTorchDispatchMode.__init__

    def is_compiling(*args: Any, **options: Any) -> bool:
        return threading.get_ident() != here and bool(asked(*args, **options))

    def noting_init(mode: Any, policy: Callable[..., Any], *rest: Any, **options: Any) -> None:
        is_here = threading.get_ident() == here
        before(mode, _noted(policy, graph) if is_here else policy, *rest, **options)

    with (
        patched(torch.utils.checkpoint, "_is_compiling", is_compiling),
        patched(_CachingTorchDispatchMode, "__init__", noting_init),
    ):
        yield


def _noted(policy: Callable[..., Any], graph: fx.Graph) -> Callable[..., Any]:
    """The policy, which notes what it says of an operation on the node that was just recorded for it."""

    def told(context: Any, operator: Any, *args: Any, **options: Any) -> Any:
        said = policy(context, operator, *args, **options)
        last = next(iter(reversed(graph.nodes)), None)
        while last is not None and last.op == "call_function" and POLICY not in last.meta:
            if last.target is operator:
                last.meta[POLICY] = _OF_TRUTH[said] if isinstance(said, bool) else said
                break
            last = last.prev
        return said

    return told


@contextmanager
def observed_checkpoints(observer: CheckpointObserver) -> Iterator[None]:
    """Report the checkpoints of the calling thread to `observer`."""
    here = threading.get_ident()
    before = _CheckpointFrame.__init__

    def observed_init(frame: Any, recompute: Callable[..., None], *rest: Any, **options: Any) -> None:
        if threading.get_ident() != here:
            before(frame, recompute, *rest, **options)
            return
        around = observer.checkpoint_starts(sys._getframe(1).f_locals.get("preserve_rng_state", True))

        def recompute_observed(*args: Any) -> None:
            with around():
                recompute(*args)

        before(frame, recompute_observed, *rest, **options)

    with patched(_CheckpointFrame, "__init__", observed_init):
        yield

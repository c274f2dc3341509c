"""See where checkpoints begin, and when they run their region again.

`torch.utils.checkpoint` has no hook for this. Its frame object is made when the region starts and calls the
function it is given when the backward needs the region again; wrapping that function is the only handle.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from whence._torch.patching import patched


class CheckpointObserver(Protocol):
    """What is told about checkpoints."""

    def checkpoint_starts(self, rewinds: bool) -> Callable[[], AbstractContextManager[None]]:
        """A checkpointed region begins; the result is entered around every recomputation of it.

        `rewinds` says whether the random number generator is rewound for a recomputation.
        """


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether an autograd node is a checkpoint of the older kind, a custom function."""
    return type(node).__name__ == f"{CheckpointFunction.__name__}Backward"


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

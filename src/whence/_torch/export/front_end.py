"""What PyTorch's bytecode front end keeps of a module whose code it has read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_READ = "__compiled_fn_"
"""How the variables begin in which it keeps what it has read."""


@contextmanager
def kept_by_nobody(model: nn.Module) -> Iterator[None]:
    """What an export in the block read of a model goes with it: the front end puts it into a variable of one
    of its own files, which would hold the model's tensors for good."""
    try:
        yield
    finally:
        tensors = {id(tensor) for tensor in _state_of_module(model)}
        loaded = sys.modules.get("torch._dynamo.functional_export")
        for name, held in [] if loaded is None else list(vars(loaded).items()):
            if name.startswith(_READ) and not tensors.isdisjoint(map(id, _state_of_module(held))):
                vars(loaded).pop(name, None)


def _state_of_module(held: Any) -> Iterator[Any]:
    yield from (*held.parameters(), *held.buffers()) if isinstance(held, nn.Module) else ()

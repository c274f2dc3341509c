"""Tensors of a run that are held when it is over are taken out of what holds them.

What code of the user can reach was looked at before it ran, and has been given back. This is for what is
left: things that nobody knew of, found by asking Python's collector who holds a tensor.
"""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from functools import _lru_cache_wrapper
from types import FrameType
from typing import Any

from torch import Tensor

from whence._torch.observe.attribute_reads import own_attributes
from whence.program.guards.observed import Read

_DEEP = 6


def take_out(tensors: Sequence[Tensor]) -> list[str]:
    """Take tensors out of everything that holds them; the kinds of things from which they cannot be taken."""
    ours = {id(tensors)}
    lost = [kind for tensor in tensors for kind in _taken_out(tensor, ours, _DEEP)]
    return list(dict.fromkeys(lost))


def _taken_out(held: Any, ours: set[int], depth: int) -> Iterator[str]:
    """From every holder of a thing; where that is a tuple, the tuple from its holders."""
    holders = [holder for holder in gc.get_referrers(held) if not isinstance(holder, FrameType)]
    ours = ours | {id(holders)}
    for holder in holders:
        if id(holder) in ours or id(holder) == id(held):
            continue
        if isinstance(holder, Read):  # what is noted of a run is needed after it
            yield "note of what was read"
        elif isinstance(holder, _lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, tuple) and depth:
            yield from _taken_out(holder, ours, depth - 1)
        elif not _removed(held, holder):
            yield type(holder).__name__


def _removed(held: Any, holder: Any) -> bool:
    if isinstance(holder, dict):
        for key in [key for key, value in dict.items(holder) if value is held]:
            dict.__delitem__(holder, key)
    elif isinstance(holder, list | deque):
        kept = [value for value in holder if value is not held]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.discard(held)
    else:
        names = [name for name, value in own_attributes(holder).items() if value is held]
        for name in names:
            object.__delattr__(holder, name)
        return bool(names)
    return True

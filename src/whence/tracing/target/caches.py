"""Caches of transformers as containers of tensors, so that a capture can take them and give them back."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import GetAttrKey, MappingKey, SequenceKey, is_container, register_container
from whence._torch.sizes.symbols import SYMBOLIC
from whence.errors import UsageError

_FILE = "transformers.cache_utils"
_COUNTS = ("cumulative_length", "cumulative_length_int")
"""Whole numbers of tokens, which are others after every call."""
_OF_KEYS = ("batch_size", "num_heads", "k_head_dim", "v_head_dim")
"""What a layer knows by the sizes of its keys."""
_OUTLINE = "outline of whence"
"""Under this a cache over other things than tensors has which of them are its leaves."""
_ACCESS: dict[Any, Any] = {dict: MappingKey, list: SequenceKey, tuple: SequenceKey}
_LEAF: tuple[()] = ()
_DEVICE = (torch.device,)
"""That of the tensors beside it, which may be moved."""
_NUMBER = (Tensor,)
"""A number that is held beside it, as a tensor."""


def register_caches() -> tuple[str, ...]:
    """Let captured models take and return the caches of transformers: `DynamicCache`, `StaticCache`,
    `EncoderDecoderCache`, and those that are derived from them by then.

    It registers them with `torch.utils._pytree`, for the process, unless somebody has done so. A capture that
    is given one, or that returns one, does it by itself, and so does loading a file with one whose class is
    imported. In a program a cache is its tensors: `kwargs['past_key_values'].layers[0].keys`. Layers with a
    sliding window count the tokens in a whole number, which is an input of its own and may vary. A captured
    model changes the cache that it is given, and gives it back, as the original does. Returns the names of
    the classes that were registered. Raises `UsageError` without transformers.
    """
    try:
        importlib.import_module(_FILE)
    except ImportError as error:
        raise UsageError("transformers is not installed", remedy="pip install transformers") from error
    return _registered_kinds(_kinds())


def open_caches(leaves: Iterable[Any]) -> bool:
    """Make containers of the caches among these leaves; False where there is none."""
    return bool(_registered_kinds(kind for kind in dict.fromkeys(map(type, leaves)) if _is_opened(kind)))


def opened(kind: object) -> type | None:
    """A class of caches as a container; None for anything else."""
    found = of_caches(kind)
    _registered_kinds([found] if found else [])
    return found


def of_caches(kind: object) -> type | None:
    """A class of caches, or of their layers; None for anything else."""
    return kind if isinstance(kind, type) and _is_opened(kind) else None


def _registered_kinds(kinds: Iterable[type]) -> tuple[str, ...]:
    new = [kind for kind in kinds if not is_container(kind)]
    for kind in new:
        register_container(kind, _flattened, _restored)
    return tuple(kind.__name__ for kind in new)


def _kinds() -> Iterator[type]:
    """The classes of caches that there are."""
    waiting: list[type] = [vars(sys.modules[_FILE])["Cache"]]
    while waiting:
        yield (kind := waiting.pop())
        waiting += kind.__subclasses__()


def _flattened(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The tensors of a cache with their accesses, and what else it takes to make it again."""
    context = vars(cache).get(_OUTLINE) or _taken(cache)
    return list(_leaves_at(cache, context)), context


def _taken(value: Any, name: str = "") -> tuple[Any, ...]:
    """What makes a value again: nothing for a leaf, a constant itself, else its class and what it holds."""
    kind = type(value)
    if name.startswith("_") and isinstance(value, Tensor):
        return _NUMBER
    if isinstance(value, (Tensor, *SYMBOLIC)) or name in _COUNTS:
        return _LEAF
    if kind is torch.device:
        return _DEVICE
    if kind in PLAIN or isinstance(value, type):
        return (value,)
    if kind not in _ACCESS and not _is_opened(kind):
        raise UsageError(
            f"a cache that holds a {kind.__name__} cannot be captured",
            remedy="capture a model whose cache holds tensors, or with use_cache=False",
        )
    rows = value.items() if kind is dict else enumerate(value) if kind in _ACCESS else _attributes(value)
    return kind, tuple((key, _taken(each, str(key))) for key, each in rows)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in vars(thing).items() if name not in _OF_KEYS)


def _leaves_at(value: Any, made: tuple[Any, ...], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """The leaves in a value, as `_taken` found it, with their accesses."""
    if not made:
        yield path, value
    kind, rows = made if len(made) > 1 else (None, ())
    access = _ACCESS.get(kind, GetAttrKey)
    for key, row in rows:
        inside = value[key] if kind in _ACCESS else vars(value)[key]
        yield from _leaves_at(inside, row, (*path, access(key)))


def _is_opened(kind: type) -> bool:
    """Whether it is a cache, or one of its layers, and what it holds is what it is."""
    is_own = kind.__module__.startswith("transformers.") and kind.__name__.endswith("Cache")
    return is_own or any(base.__module__ == _FILE for base in kind.__mro__)


def _restored(leaves: Any, context: Any) -> Any:
    cache = _made(context, iter(leaves))
    if not all(_is_known_again(*row) for row in _leaves_at(cache, context)):
        vars(cache)[_OUTLINE] = context
    return cache


def _is_known_again(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a leaf is known for one by itself: an outline would hide what a layer is given later."""
    return isinstance(leaf, (Tensor, *SYMBOLIC)) or getattr(path[-1], "name", "") in _COUNTS


def _made(made: tuple[Any, ...], waiting: Iterator[Any]) -> Any:
    """The value that `_taken` has looked at, over the tensors that are waiting."""
    if len(made) < 2:
        return made[0] if made else next(waiting)
    kind, rows = made
    held = {key: _made(row, waiting) for key, row in rows}
    if kind is dict:
        return held
    return kind(held.values()) if kind in (list, tuple) else _object(kind, held)


def _object(kind: Any, held: dict[str, Any]) -> Any:
    """A cache or a layer; what it knows by its tensors is as where it was made."""
    thing, first = kind.__new__(kind), next(_tensors(held), None)
    device = None if first is None else first.device
    for name, each in held.items():
        value = held[name[1:].rpartition("_")[0]] if each is Tensor else each
        made = torch.tensor(value) if each is Tensor else value
        vars(thing)[name] = device if each is torch.device else made
    if "max_cache_len" in held and isinstance(keys := held.get("keys"), Tensor):
        thing.batch_size, thing.num_heads, _, thing.k_head_dim = keys.shape
        thing.v_head_dim = held["values"].shape[-1]
    return thing


def _tensors(held: dict[Any, Any]) -> Iterator[Tensor]:
    for value in held.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value

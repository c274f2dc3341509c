"""Caches of transformers as containers of tensors, so that a capture can take them and give them back."""

import importlib
from collections.abc import Iterable
from typing import Any

from whence._torch.pytrees import GetAttrKey, SequenceKey, is_container, register_container
from whence.errors import UsageError

_LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DynamicLayer": (("keys", "values"), ()),
    "DynamicSlidingWindowLayer": (("keys", "values", "cumulative_length"), ("sliding_window",)),
    "StaticLayer": (("keys", "values", "cumulative_length"), ("max_cache_len",)),
    "StaticSlidingWindowLayer": (
        ("keys", "values", "cumulative_length", "cumulative_length_int"),
        ("max_cache_len",),
    ),
}
"""The layers that are nothing but these tensors and numbers, and what they are made with."""


def register_caches() -> tuple[str, ...]:
    """Let captured models take and return transformers' `DynamicCache`, `StaticCache`, `EncoderDecoderCache`.

    It registers them with `torch.utils._pytree`, for the process, unless somebody has done so. A capture that
    is given one, or that returns one, does it by itself; a process that loads a file calls it first. In a
    program a cache is its tensors: `kwargs['past_key_values'].layers[0].keys`. Layers with a sliding window
    count the tokens in a whole number, which is an input of its own and may vary. A captured model
    changes the cache that it is given, and gives it back, as the original does. Returns the names of the
    classes that were registered. Raises `UsageError` without transformers.
    """
    try:
        found: Any = importlib.import_module("transformers.cache_utils")
    except ImportError as error:
        raise UsageError("transformers is not installed", remedy="pip install transformers") from error
    new = [name for name in _CONTAINERS if not is_container(getattr(found, name))]
    for name in new:
        register_container(getattr(found, name), *_CONTAINERS[name])
    return tuple(new)


def open_caches(leaves: Iterable[Any]) -> bool:
    """Make containers of the caches among these leaves; False where there is none."""
    kinds = {(type(leaf).__module__, type(leaf).__name__) for leaf in leaves}
    there = any(("transformers.cache_utils", name) in kinds for name in _CONTAINERS)
    return there and bool(register_caches())


def _flattened(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The tensors of a cache with their accesses, and what else it takes to make it again."""
    rows: list[tuple[Any, Any]] = []
    layers = []
    for number, layer in enumerate(cache.layers):
        known = _LAYERS.get(type(layer).__name__)
        if known is None or getattr(layer, "record_past", False):
            raise UsageError(
                f"a cache with a {type(layer).__name__} cannot be captured",
                remedy="capture a model whose attention sees everything or a window, or with use_cache=False",
            )
        names, options = known
        held = tuple(name for name in names if getattr(layer, name) is not None)
        rows += [(_path(number, name), getattr(layer, name)) for name in held]
        made_with = tuple((name, getattr(layer, name)) for name in options)
        layers.append((type(layer), held, layer.is_initialized, made_with))
    return rows, (type(cache), tuple(layers), cache.layer_class_to_replicate)


def _path(number: int, name: str) -> tuple[Any, ...]:
    return GetAttrKey("layers"), SequenceKey(number), GetAttrKey(name)


def _restored(tensors: Any, context: Any) -> Any:
    kind, layers, replicated = context
    cache = kind.__new__(kind)
    waiting = iter(tensors)
    cache.layers = [_layer(row, waiting) for row in layers]
    cache.layer_class_to_replicate = replicated
    cache.offloading = False
    return cache


def _halves(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The two caches of a decoder that looks at an encoder, and of which layers the second is filled."""
    names = ("self_attention_cache", "cross_attention_cache")
    rows = [((GetAttrKey(name),), getattr(cache, name)) for name in names]
    return rows, (type(cache), tuple(cache.is_updated.items()))


def _joined(caches: Any, context: Any) -> Any:
    kind, filled = context
    cache = kind.__new__(kind)
    cache.self_attention_cache, cache.cross_attention_cache = caches
    cache.is_updated = dict(filled)
    return cache


def _layer(row: Any, tensors: Any) -> Any:
    kind, held, initialised, made_with = row
    options = dict(made_with)
    longest = options.get("max_cache_len")
    if "cumulative_length_int" in held:  # it asks for the window, and keeps the shorter of the two
        options["sliding_window"] = longest
    layer = kind(**options)
    for name in held:
        setattr(layer, name, next(tensors))
    layer.is_initialized = initialised
    if initialised and hasattr(layer.keys, "dtype"):
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        if longest is not None:
            layer.batch_size, layer.num_heads = layer.keys.shape[:2]
            layer.k_head_dim, layer.v_head_dim = layer.keys.shape[-1], layer.values.shape[-1]
    return layer


_CONTAINERS = {
    "DynamicCache": (_flattened, _restored),
    "StaticCache": (_flattened, _restored),
    "EncoderDecoderCache": (_halves, _joined),
}
"""How each class comes apart, and how it is put together again."""

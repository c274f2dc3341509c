"""torch.export's vocabulary of dynamic shapes, read as data.

`Dim`, `ShapesCollection` and `AdditionalInputs` are public; what `Dim.AUTO` and `2 * dim` are is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch.export import AdditionalInputs, Dim, ShapesCollection
from torch.export.dynamic_shapes import _DerivedDim, _DimHint, _DimHintType, _StaticDim


class Freedom(StrEnum):
    """How far a dimension may vary.

    `NAMED` over all of a `Dim`'s range, which the model must allow. `DYNAMIC` over what the model allows,
    which must be more than one size. `AUTO` over what the model allows, be it one size. `STATIC` not at all.
    """

    NAMED = "named"
    DYNAMIC = "dynamic"
    AUTO = "auto"
    STATIC = "static"


_HINTS = {
    _DimHintType.AUTO: Freedom.AUTO,
    _DimHintType.DYNAMIC: Freedom.DYNAMIC,
    _DimHintType.STATIC: Freedom.STATIC,
}


@dataclass(frozen=True)
class DimWish:
    """What a person asked of one dimension.

    `low` and `high` bound the size called `name`, of which the dimension is `scale` times plus `offset`.
    `value` is the only size a static dimension may have, where it was written out. `text` is how it is
    written.
    """

    freedom: Freedom
    text: str
    name: str = ""
    low: int | None = None
    high: int | None = None
    scale: int = 1
    offset: int = 0
    value: int | None = None

    @property
    def is_derived(self) -> bool:
        """Whether the dimension is computed from the size."""
        return self.scale != 1 or self.offset != 0

    @property
    def bounds(self) -> str:
        """The range as arguments are written: `min=2, max=8`."""
        ends = {"min": self.low or None, "max": self.high}
        return ", ".join(f"{name}={end}" for name, end in ends.items() if end is not None)


def wish_of(dim: Any) -> DimWish | None:
    """What a `Dim`, a hint, a number or None asks for; None for anything else."""
    if dim is None:
        return DimWish(Freedom.STATIC, "None")
    if type(dim) is int:
        return DimWish(Freedom.STATIC, str(dim), value=dim)
    if isinstance(dim, _DimHint):
        wish = DimWish(_HINTS[dim.type], "", low=dim.min, high=dim.max)
        bounds = f"({wish.bounds})" if wish.bounds else ""
        return DimWish(wish.freedom, f"Dim.{dim.type.name}{bounds}", low=dim.min, high=dim.max)
    if isinstance(dim, _StaticDim):
        return DimWish(Freedom.STATIC, str(dim.value), value=dim.value)
    if isinstance(dim, _DerivedDim):
        root = _named_wish(dim.root)
        offset = int(dim.fn(0))
        scale = int(dim.fn(1)) - offset
        return DimWish(Freedom.NAMED, str(dim.__name__), root.name, root.low, root.high, scale, offset)
    return _named_wish(dim) if isinstance(dim, Dim) else None


def _named_wish(dim: Any) -> DimWish:
    name = str(dim.__name__)
    high = int(dim.max) if isinstance(dim.max, int) else None
    wish = DimWish(Freedom.NAMED, "", name, int(dim.min), high)
    text = f"Dim({', '.join([repr(name), *filter(None, [wish.bounds])])})"
    return DimWish(Freedom.NAMED, text, name, wish.low, high)


def is_spelled_out(spec: object) -> bool:
    """Whether shapes are given as they are, and not by an object that works them out."""
    return spec is None or isinstance(spec, dict | tuple | list)


def spelled_out(spec: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The shapes that a `ShapesCollection` or `AdditionalInputs` stands for, by the names of arguments."""
    return spec.dynamic_shapes(call, args, dict(kwargs))


def is_collection(spec: object) -> bool:
    """Whether an object works shapes out from example inputs."""
    return isinstance(spec, ShapesCollection | AdditionalInputs)


def further_examples(spec: object) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs that were added as examples, beside those of the capture."""
    examples = spec._examples if isinstance(spec, AdditionalInputs) else []
    return [(args, dict(kwargs or {})) for args, kwargs in examples]


def dim_of(wish: DimWish, roots: dict[str, Any]) -> Any:
    """A wish as a person would write it; a `Dim` of one name is one object, kept in `roots`."""
    if wish.freedom is Freedom.STATIC:
        return Dim.STATIC
    if wish.freedom is not Freedom.NAMED:
        hint = Dim.AUTO if wish.freedom is Freedom.AUTO else Dim.DYNAMIC
        return hint(min=wish.low, max=wish.high) if wish.bounds else hint
    if wish.name not in roots:
        roots[wish.name] = Dim(wish.name, min=wish.low, max=wish.high)
    dim = roots[wish.name]
    dim = dim if wish.scale == 1 else wish.scale * dim
    return dim + wish.offset if wish.offset > 0 else dim - -wish.offset if wish.offset else dim


def written(wish: DimWish) -> str:
    """A wish as source, every `Dim` spelled out."""
    if wish.freedom is Freedom.STATIC:
        return "Dim.STATIC"
    if wish.freedom is not Freedom.NAMED:
        hint = f"Dim.{wish.freedom.name}"
        return f"{hint}({wish.bounds})" if wish.bounds else hint
    text = f"Dim({', '.join(filter(None, [repr(wish.name), wish.bounds]))})"
    text = f"{wish.scale}*{text}" if wish.scale != 1 else text
    return f"{text} {'+' if wish.offset > 0 else '-'} {abs(wish.offset)}" if wish.offset else text


def dim_in_words(value: object) -> str | None:
    """What was asked of a dimension, or of several, as it is printed; None for anything else."""
    if isinstance(value, Dim | _DerivedDim | _StaticDim | _DimHint | ShapesCollection | AdditionalInputs):
        return str(getattr(value, "__name__", None) or value)
    return None

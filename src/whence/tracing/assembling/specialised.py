"""Sizes that were asked to vary and that the model does not let vary so far: all of them, in one error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from whence._torch.sizes.dims import DimWish, Freedom, dim_of, written
from whence.errors import Fault, Place, SpecialisedShapes
from whence.program.arguments.open_sizes import ZERO_ONE, Asker, Dimension, Restriction
from whence.tracing.target.dynamic_shapes import DynamicSizes, ExampleLeaf, Layout

if TYPE_CHECKING:
    from whence._torch.sizes.environment import Decision, SizeEnvironment

_SMALLEST = 2
"""Sizes below it are special for broadcasting: to leave them out is said, and is no error."""


@dataclass(frozen=True)
class Less:
    """What the model allows of the size of one name: how it is restricted, and wishes that it does fulfil."""

    kind: str
    allowed: str
    decision: "Decision | None"
    wish: DimWish


def refuse_less(
    environment: "SizeEnvironment", dynamic: DynamicSizes, names: Mapping[Dimension, str]
) -> None:
    """Raise `SpecialisedShapes` where less is allowed than was asked for."""
    firm = {at: wish for at, wish in dynamic.wishes.items() if wish.freedom is not Freedom.AUTO}
    less = {at: found for at in firm if (found := _less(environment, dynamic, names, at)) is not None}
    if not less:
        return
    rows = tuple(
        _restriction(environment, at, dynamic.wishes[at], found, environment.bases.get(names[at]))
        for at, found in less.items()
    )
    wishes = dict(dynamic.wishes) | {at: found.wish for at, found in less.items()}
    raise _specialised(rows, dynamic, wishes)


def _specialised(
    rows: tuple[Restriction, ...], dynamic: DynamicSizes, wishes: Mapping[Dimension, DimWish]
) -> SpecialisedShapes:
    error = SpecialisedShapes(_WHAT, remedy=_remedy(rows, _layout_in_words(dynamic.layout, wishes)))
    error.faults = tuple(Fault(str(row), _place_of_asker(row.by)) for row in rows)
    error.dimensions = rows
    error.suggested = _suggested(dynamic.layout, wishes, {})
    return error


def asker(decision: "Decision | None") -> Asker:
    """The line of code that decided, and the module it ran in."""
    module, source = (None, None) if decision is None or decision.place is None else decision.place
    return Asker(module=module, source=source)


def _less(
    environment: "SizeEnvironment", dynamic: DynamicSizes, names: Mapping[Dimension, str], at: Dimension
) -> Less | None:
    wish, symbol = dynamic.wishes[at], environment.bases.get(names[at])
    if symbol is None:
        return Less("fixed", str(dynamic.sizes[at]), None, DimWish(Freedom.STATIC, "Dim.STATIC"))
    stands_for = environment.replace(symbol)
    if stands_for.is_number:
        size = int(stands_for) * wish.scale + wish.offset
        fixed = DimWish(Freedom.STATIC, "Dim.STATIC")
        return Less("fixed", str(size), environment.cause_of(symbol), fixed)
    if wish.freedom is not Freedom.NAMED:
        return None
    if stands_for != symbol:
        return _tied(environment, dynamic, names, at)
    return _smaller(environment, wish, symbol)


def _tied(
    environment: "SizeEnvironment", dynamic: DynamicSizes, names: Mapping[Dimension, str], at: Dimension
) -> Less:
    """A size that is always made of another one."""
    wish, symbol = dynamic.wishes[at], environment.bases[names[at]]
    found = environment.linear(symbol)
    other = None if found is None else environment.names[found[0]]
    there = next((place for place, name in names.items() if name == other), None)
    cause = environment.cause_of(symbol)
    allowed = environment.spelled(environment.replace(symbol) * wish.scale + wish.offset)
    if found is None or there is None or dynamic.wishes[there].freedom is not Freedom.NAMED:
        return Less("tied", allowed, cause, DimWish(Freedom.AUTO, "Dim.AUTO"))
    _, scale, offset = found
    asked_there = dynamic.wishes[there]
    less = _smaller(environment, asked_there, environment.bases[names[there]])
    root = asked_there if less is None else less.wish
    times = root.scale // asked_there.scale  # more than 1 where the other is a multiple, and has a new name
    changed = replace(
        root,
        scale=wish.scale * scale * times,
        offset=wish.scale * offset + wish.offset,
        text=allowed if times == 1 else "",
    )
    words = allowed if (scale, offset) != (1, 0) else f"what {there} is"
    return Less("tied", words, cause, changed)


def _smaller(environment: "SizeEnvironment", wish: DimWish, symbol: Any) -> Less | None:
    """A size that stays free, and may be fewer numbers than were asked for."""
    return _narrowed(environment, wish, symbol) or _multiple(environment, wish)


def _narrowed(environment: "SizeEnvironment", wish: DimWish, symbol: Any) -> Less | None:
    low, high = environment.range_of(symbol)
    lowest, highest = wish.low or 0, wish.high
    too_low = low > max(lowest, _SMALLEST)
    too_high = high is not None and (highest is None or high < highest)
    if not too_low and not too_high:
        return None
    named = environment.names[symbol]
    cause = next((found.decision for found in environment.found() if found.names == {named}), None)
    end = "" if high is None else f" and {high * wish.scale + wish.offset}"
    start = low * wish.scale + wish.offset
    words = f"between {start}{end}" if end else f"at least {start}"
    return Less("narrowed", words, cause, replace(wish, low=low, high=high))


def _multiple(environment: "SizeEnvironment", wish: DimWish) -> Less | None:
    for found in environment.found():
        divisor = found.divisor
        if found.names == {wish.name} and divisor is not None:
            low = -(-(wish.low or 0) // divisor)
            high = None if wish.high is None else wish.high // divisor
            part = DimWish(
                Freedom.NAMED, "", f"{wish.name}_by_{divisor}", low, high, wish.scale * divisor, wish.offset
            )
            return Less("multiple", f"a multiple of {divisor * wish.scale}", found.decision, part)
    return None


_VERBS = {
    "fixed": "was fixed to {}",
    "tied": "is always {}",
    "narrowed": "can only be {}",
    "multiple": "can only be {}",
}


def _restriction(
    environment: "SizeEnvironment", at: Dimension, wish: DimWish, less: Less, symbol: Any
) -> Restriction:
    names_no_symbol = less.decision is None and less.kind == "fixed"
    return Restriction(
        dimension=at,
        asked=wish.text,
        kind=less.kind,
        allowed=less.allowed,
        question="" if names_no_symbol else _question(environment, less.decision, symbol),
        by=Asker(asked=ZERO_ONE) if names_no_symbol else asker(less.decision),
        zero_one=names_no_symbol,
        statement=_VERBS[less.kind].format(less.allowed),
    )


def _question(environment: "SizeEnvironment", decision: "Decision | None", symbol: Any) -> str:
    """What the code did with the size."""
    if decision is None:
        return "required it"
    if not decision.is_comparison:
        asked = environment.spelled(decision.asked)
        return f"{_TOOK} {asked} as a Python number (range(), len(), int(), an index)"
    other = decision.compared_with(symbol)
    if other is not None:
        return f"compared it with {environment.spelled(other)}"
    return f"asked whether {environment.spelled(decision.asked)}"


_TOOK = "took"
_WHAT = "the model does not allow all sizes that dynamic_shapes asks for"


def _place_of_asker(by: Asker) -> Place:
    module = None if by.module is None else str(by.module)
    return Place(module, None if by.source is None else str(by.source))


def _remedy(rows: Sequence[Restriction], suggestion: str) -> str:
    small, others = any(row.zero_one for row in rows), any(not row.zero_one for row in rows)
    as_numbers = any(row.question.startswith(_TOOK) for row in rows)
    options = [
        "capture with an example of 2 or more where it has 0 or 1" if small else "",
        "change the lines named so that they work for every size" if others else "",
        "write x.shape[0] for len(x): it varies where Python's own number does not" if as_numbers else "",
        f"ask for what is allowed (error.suggested): dynamic_shapes={suggestion}",
        "write Dim.AUTO for these dimensions, which takes what is allowed",
    ]
    return "".join(f"\n    * {option}" for option in filter(None, options))


def _suggested(layout: Layout, wishes: Mapping[Dimension, DimWish], roots: dict[str, Any]) -> Any:
    """`dynamic_shapes` for these wishes, arranged as the arguments are."""
    if isinstance(layout, dict):
        return {key: _suggested(inside, wishes, roots) for key, inside in layout.items()}
    if isinstance(layout, list):
        return [_suggested(inside, wishes, roots) for inside in layout]
    found = {dim: dim_of(wish, roots) for dim, wish in _of_leaf(layout, wishes)}
    return found.get(None, found or None)


def _layout_in_words(layout: Layout, wishes: Mapping[Dimension, DimWish]) -> str:
    if isinstance(layout, dict):
        rows = (f"{key!r}: {_layout_in_words(inside, wishes)}" for key, inside in layout.items())
        return f"{{{', '.join(rows)}}}"
    if isinstance(layout, list):
        return f"[{', '.join(_layout_in_words(inside, wishes) for inside in layout)}]"
    found = {dim: written(wish) for dim, wish in _of_leaf(layout, wishes)}
    rows = (f"{dim}: {text}" for dim, text in found.items())
    return found.get(None, f"{{{', '.join(rows)}}}" if found else "None")


def _of_leaf(leaf: ExampleLeaf, wishes: Mapping[Dimension, DimWish]) -> Iterator[tuple[int | None, DimWish]]:
    return ((at.dim, wish) for at, wish in wishes.items() if at.position == leaf.position)

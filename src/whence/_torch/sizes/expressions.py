"""Questions about sympy expressions of sizes, and how people write them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

_RELATIONS: dict[Any, Callable[[int], str]] = {
    sympy.Eq: str,
    sympy.Ne: lambda value: f"other than {value}",
    sympy.Ge: lambda value: f"at least {value}",
    sympy.Gt: lambda value: f"at least {value + 1}",
    sympy.Le: lambda value: f"at most {value}",
    sympy.Lt: lambda value: f"at most {value - 1}",
}


def _solved(condition: Any) -> int | None:
    """The one number of which an equation of one size speaks: 1 for `64*s != 64`."""
    found = linear(condition.lhs - condition.rhs)
    if found is None or found[1] == 0 or found[2] % found[1]:
        return None
    return -found[2] // found[1]


def _bound(condition: Any) -> tuple[Any, int] | None:
    """The bound that an inequality of one size comes to: at most 6 for `s - 7 < 0`."""
    found = None if isinstance(condition, sympy.Eq | sympy.Ne) else linear(condition.lhs - condition.rhs)
    if found is None or abs(found[1]) != 1:
        return None
    turned = condition if found[1] > 0 else condition.reversed
    return type(turned), -found[2] * found[1]


def divisor(condition: Any) -> int | None:
    """The number of which a condition says that the one size in it is a multiple."""
    left, right = condition.args
    if not isinstance(condition, sympy.Eq) or right != 0 or type(left).__name__ not in ("Mod", "PythonMod"):
        return None
    value, divisor = left.args
    return int(divisor) if value.is_Symbol and divisor.is_Integer else None


def in_words(condition: Any, names: Mapping[Any, str]) -> str:
    """A condition on one size as what it must be; any other as it is."""
    symbols = condition.free_symbols
    if len(symbols) == 1 and isinstance(condition, sympy.core.relational.Relational):
        turned = condition if condition.lhs.is_Symbol else condition.reversed
        if turned.lhs.is_Symbol and turned.rhs.is_Integer:
            return _RELATIONS[type(turned)](int(turned.rhs))
        if isinstance(condition, sympy.Eq | sympy.Ne) and (solved := _solved(condition)) is not None:
            return _RELATIONS[type(condition)](solved)
        if (bound := _bound(condition)) is not None:
            return _RELATIONS[bound[0]](bound[1])
        if divisor(condition) is not None:
            return f"a multiple of {divisor(condition)}"
    return f"such that {spell(condition, names)}"


def linear(found: Any) -> tuple[Any, int, int] | None:
    """The one symbol of an expression, how often it is taken, and what is added; None for other forms."""
    if len(found.free_symbols) != 1 or found.has(sympy.Function):  # a quotient has no value where it is 0 / 0
        return None
    (symbol,) = found.free_symbols
    offset = found.subs(symbol, 0)
    scale = found.subs(symbol, 1) - offset
    if not (offset.is_Integer and scale.is_Integer) or sympy.expand(scale * symbol + offset - found) != 0:
        return None
    return symbol, int(scale), int(offset)


def is_implied(condition: Any, others: Sequence[Any]) -> bool:
    """Whether bounds on one size make a condition on the same size needless."""
    span = _span(condition)
    if span is None:
        return False
    for other in others:
        known = _span(other)
        if known is None or other.free_symbols != condition.free_symbols or isinstance(other, sympy.Ne):
            continue
        if isinstance(condition, sympy.Ne):
            if not known[0] <= span[0] <= known[1]:
                return True
        elif span[0] <= known[0] and known[1] <= span[1]:
            return True
    return False


def _span(condition: Any) -> tuple[Any, Any] | None:
    """The smallest and the largest size that a condition on one size alone names; None for others."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return None
    turned = condition if condition.lhs.is_Symbol else condition.reversed
    if not (turned.lhs.is_Symbol and turned.rhs.is_Integer):
        return None
    value = int(turned.rhs)
    spans = {
        sympy.Ge: (value, int_oo),
        sympy.Gt: (value + 1, int_oo),
        sympy.Le: (-int_oo, value),
        sympy.Lt: (-int_oo, value - 1),
    }
    return spans.get(type(turned), (value, value))


def value_where(found: Any, numbers: Mapping[Any, Any]) -> Any:
    """An expression where symbols are these numbers; None where it divides by 0 then."""
    try:
        return found.xreplace(numbers)
    except ZeroDivisionError:
        return None


def are_same_at(left: Any, right: Any, at: Mapping[str, int]) -> bool:
    """Whether sizes of two environments are the same, where some, by name, are these numbers."""
    numbers = {sympy.Symbol(name, integer=True): number for name, number in at.items()}
    try:
        found, other = (over_names(size).xreplace(numbers) for size in (left, right))
        return bool(found == other or sympy.expand(found - other) == 0)
    except (ArithmeticError, TypeError):  # divided by 0, or yes and no
        return False


def number_at(size: Any, at: Mapping[str, int]) -> int | None:
    """What a size is where some, by name, are these numbers; None where others count, too."""
    numbers = {sympy.Symbol(name, integer=True): sympy.Integer(number) for name, number in at.items()}
    found = over_names(size).xreplace(numbers)
    return int(found) if found.is_number else None


def over_names(size: Any) -> Any:
    """A size over symbols that are called as sizes are."""
    if not hasattr(size, "node"):
        return sympy.sympify(size)
    names, found = getattr(size.node.shape_env, "names", {}), size.node.expr  # PyTorch's own has none
    symbols = {each: sympy.Symbol(names.get(each, str(each)), integer=True) for each in found.free_symbols}
    return found.xreplace(symbols)


def spelled_sum(terms: Mapping[Any, int]) -> str:
    """The sum of expressions, each with how often it occurs, as Python source."""
    return spell(sympy.expand(sympy.Add(*(term * count for term, count in terms.items()))), {})


def terms_of(found: Any) -> dict[Any, int]:
    """An expression over sizes as a sum: what is added up, and how often."""
    terms = sympy.expand(sympy.sympify(found)).as_coefficients_dict()
    return {term: int(count) for term, count in terms.items()}


def is_multiple(term: Any, other: Any) -> bool:
    """Whether one term is another, times sizes."""
    factors = (term / other).as_powers_dict() if term != other else {}
    return all(
        (base.is_Symbol and power.is_integer and power > 0) or base == 1 for base, power in factors.items()
    )


def can_view(shape: Sequence[Any], strides: Sequence[Any], wanted: Sequence[Any] | None) -> bool | None:
    """Whether a view of a tensor laid out so has the shape wanted; without one, whether it is contiguous.

    Dimensions that do not lie in one another's rows stay apart, so that what is inside of them must be as
    many elements as what is inside of a wanted one. None where open sizes of two and more decide.
    """
    ones = [_is_same_size(size, 1) for size in shape]
    if 0 in shape or None in ones:
        return True if 0 in shape else None
    rows = [(shape[dim], strides[dim]) for dim in reversed(range(len(shape))) if not ones[dim]]
    joined = [_is_same_size(outer[1], inner[0] * inner[1]) for inner, outer in pairwise(rows)]
    if wanted is None:
        return _every([_is_same_size(rows[0][1], 1), *joined] if rows else [])
    counts = [*accumulate((size for size, _ in rows[:-1]), mul)]
    ends = [*accumulate(reversed(wanted), mul)]
    answers = (
        _some([one, *(_is_same_size(count, end) for end in ends)])
        for one, count in zip(joined, counts, strict=True)
    )
    return _every([*answers])


def _every(answers: Sequence[bool | None]) -> bool | None:
    return None if None in answers and False not in answers else False not in answers


def _some(answers: Sequence[bool | None]) -> bool | None:
    return None if None in answers and True not in answers else True in answers


def _is_same_size(left: Any, right: Any) -> bool | None:
    """Whether two sizes are the same; None where open ones of two and more decide."""
    if type(left) is int and type(right) is int:
        return left == right
    found = sympy.expand(left - right)
    if found == 0:
        return True
    over = sympy.expand(found.xreplace({symbol: symbol + 2 for symbol in found.free_symbols}))
    terms = over.as_coefficients_dict() if over.is_polynomial(*over.free_symbols) else {}
    is_apart = sympy.S.One in terms and len({factor > 0 for factor in terms.values()}) == 1
    return False if is_apart else None


def spell(found: Any, names: Mapping[Any, str]) -> str:
    """A sympy expression as Python source."""
    text: str = _Printer(names).doprint(found)
    return text


class _Printer(PythonPrinter):
    """Prints expressions as Python would evaluate them, with names of our own for symbols."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802 - sympy finds printers by the name of the class
        return self._names.get(symbol, str(symbol))

    def _print_Float(self, number: Any) -> str:  # noqa: N802
        return repr(float(number))


def asks_for_one(asked: Any) -> bool:
    """Whether somebody asks if a size, or a stride that is a multiple of it, is that of 1."""
    if not isinstance(asked, (sympy.Eq, sympy.Ne)) or not asked.rhs.is_Integer or not asked.rhs:
        return False
    return bool((asked.lhs / asked.rhs).is_Symbol)

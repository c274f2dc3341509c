"""Open sizes as plain data: expressions as nested lists, built again from a fixed table of functions.

What makes symbols is imported when the first is met, as for `symbols.py`.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import SymBool, SymFloat, SymInt

from whence._torch.sizes.symbols import expression, is_symbolic, number_of, whole_bound

_SYMPY = ("Add", "Mul", "Pow", "Rational", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not")
_TORCHS = (
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt"),
    *("Max", "Min", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt"),
    *("RoundToInt", "RoundDecimal", "ToFloat", "Identity", "OpaqueUnaryFn_sqrt", "LShift", "RShift"),
)
_SHORT = {"Equality": "Eq", "Unequality": "Ne", "StrictLessThan": "Lt", "LessThan": "Le"}
_SHORT |= {"StrictGreaterThan": "Gt", "GreaterThan": "Ge", "Half": "Rational", "NegativeOne": "Rational"}
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
_STEEPEST = 64
_LARGEST = 2**63
_MOST = 1000
"""Parts of an expression, before it is more than a model computes of its sizes."""


class UnreadableSize(ValueError):
    """An expression that is none of a size."""


def _number(kind: Any) -> str:
    return {SymInt: "whole", SymFloat: "real", SymBool: "truth"}[kind]


@dataclass
class SizeStructures:
    """Writes sizes: `symbols` are those in them, each with its names and what is known of it."""

    symbols: list[list[Any]] = field(default_factory=list)
    _numbers: dict[tuple[int, Any], int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def written(self, size: Any) -> Any:
        """A size: its kind, what it is in the example, and the expression."""
        if not is_symbolic(size):
            return [_number(type(size)), number_of(size), number_of(size)]
        hint = size.node.hint
        environment = size.node.shape_env
        self._kept.append(environment)
        return [_number(type(size)), hint, self._expression(expression(size), environment)]

    def _expression(self, found: Any, environment: Any) -> Any:
        if found.is_Symbol:
            return ["symbol", self._symbol(found, environment)]
        if found.is_Integer:
            return int(found)
        if found.is_Rational:
            return ["Rational", int(found.p), int(found.q)]
        if found.is_Float:
            return float(found)
        if found in (True, False):
            return bool(found)
        head = type(found).__name__
        return [_SHORT.get(head, head), *(self._expression(each, environment) for each in found.args)]

    def _symbol(self, symbol: Any, environment: Any) -> int:
        key = id(environment), symbol
        if key not in self._numbers:
            self._numbers[key] = len(self.symbols)
            name = getattr(environment, "names", {}).get(symbol, str(symbol))
            bounds = environment.var_to_range.get(symbol)
            value = environment.backed_var_to_val.get(symbol)
            limits = (None, None) if bounds is None else (_limit(bounds.lower), _limit(bounds.upper))
            kind = "whole" if symbol.is_integer else "real"
            self.symbols.append([name, str(symbol), kind, None if value is None else int(value), *limits])
        return self._numbers[key]


@cache
def _heads() -> Mapping[str, Any]:
    """The functions that an expression may be made of."""
    sympy = importlib.import_module("sympy")
    functions = importlib.import_module("torch.utils._sympy.functions")
    found = {name: getattr(sympy, name) for name in _SYMPY}
    return found | {name: getattr(functions, name) for name in _TORCHS if hasattr(functions, name)}


class SizeReader:
    """Makes sizes again, over symbols of one environment.

    Raises `UnreadableSize` for what no size is made of.
    """

    def __init__(self, mode: Any, symbols: Sequence[Sequence[Any]]) -> None:
        self._environment = mode.shape_env
        self._symbols = [self._made(*row) for row in symbols]
        self.names = {row[1]: str(symbol) for row, symbol in zip(symbols, self._symbols, strict=True)}

    def _made(self, name: str, _text: str, kind: str, value: int | None, low: Any, high: Any) -> Any:
        environment = self._environment
        if name not in environment.bases:
            if kind == "real":
                self._hold(name, environment.create_unbacked_symfloat())
            elif value is None:
                self._hold(name, environment.create_unbacked_symint())
                environment.bound(environment.bases[name], low, high)
            elif low is None or low < 0:
                environment.number(name, value, low, high)
            else:
                environment.base(name, value, low, high)
        return environment.bases[name]

    def _hold(self, name: str, number: Any) -> None:
        symbol = expression(number)
        self._environment.bases[name], self._environment.names[symbol] = symbol, name

    def read(self, kind: str, hint: Any, structure: Any) -> Any:
        """A size of a kind, which has the value `hint` in the example."""
        budget = [_MOST]
        found = self._expression(structure, budget)
        environment = self._environment
        if getattr(found, "is_number", False) or found in (True, False):
            return {"whole": int, "real": float, "truth": bool}[kind](found)
        if kind == "truth":
            return environment.create_symboolnode(found)
        make = environment.create_symintnode if kind == "whole" else environment.create_symfloatnode
        return make(found, hint=hint)

    def _expression(self, structure: Any, budget: list[int]) -> Any:
        budget[0] -= 1
        if budget[0] < 0:
            raise UnreadableSize("it has too many parts")
        sympy = importlib.import_module("sympy")
        if isinstance(structure, bool):
            return sympy.true if structure else sympy.false
        if isinstance(structure, int):
            return sympy.Integer(_bounded(structure))
        if isinstance(structure, float):
            return sympy.Float(structure)
        head, *parts = structure
        if head == "symbol":
            return self._symbols[_position(parts[0], len(self._symbols))]
        made = [self._expression(part, budget) for part in parts]
        if head in _POWERS and not all(each.is_number and abs(each) <= _STEEPEST for each in made[1:]):
            raise UnreadableSize("it has a power that nobody limits")
        return _heads()[head](*made)


def _limit(bound: Any) -> int | None:
    """A bound of a symbol; None for one that no size reaches, as how many elements may be nonzero has it."""
    found = whole_bound(bound)
    return None if found is None or abs(found) > _LARGEST // 4 else found


def _bounded(number: int) -> int:
    if abs(number) > _LARGEST:
        raise UnreadableSize("it has a number that no size has")
    return number


def _position(number: Any, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise UnreadableSize("it has a symbol that is not there")
    return number

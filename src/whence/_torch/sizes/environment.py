"""PyTorch's `ShapeEnv`, told apart from its defaults and read afterwards; with it comes sympy.

Two things are otherwise than in torch.export, so that a size of 0 or 1 is admitted unless the model really
does something else then: symbols may be 0 and 1 (`specialize_zero_one=False`), and PyTorch's own bookkeeping,
such as whether a tensor is contiguous, does not decide on sizes (`backed_size_oblivious`). What is left are
decisions of the code that runs, and each is noted with the line that took it.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt
from torch._guards import Source
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StrictMinMaxConstraint,
    free_unbacked_symbols,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as UnknownSize
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges


@dataclass(frozen=True)
class Decision:
    """Something that the running code decided by sizes: `condition` held for the example.

    `asked` is what was evaluated; a plain symbol was needed as a number. `place` is what the listener said of
    where it happened.
    """

    condition: Any
    asked: Any
    place: Any

    @property
    def is_comparison(self) -> bool:
        """Whether a question was answered with yes or no."""
        return isinstance(self.asked, sympy.logic.boolalg.Boolean) and not self.asked.is_Symbol

    def compared_with(self, symbol: Any) -> Any:
        """What a size was compared with; None where it was asked something else."""
        if not isinstance(self.asked, sympy.Eq | sympy.Ne) or symbol not in self.asked.args:
            return None
        return next(side for side in self.asked.args if side != symbol)


@dataclass(frozen=True)
class _Named(Source):
    """Where a symbol comes from, as far as PyTorch needs to know: a name.

    Of two equal sizes the one that `yields` is spelled as the other: nobody called it by a name.
    """

    text: str
    yields: bool = False

    def is_ephemeral(self) -> bool:
        """Whether PyTorch is to replace the symbol first."""
        return self.yields

    @property
    def _name_template(self) -> str:
        return self.text


class SizeEnvironment(ShapeEnv):
    """The symbols of one capture, their names, and what was decided by them.

    `bases` are the symbols of inputs by name, `names` says how every symbol is spelled. `where` is asked
    for the place of a decision; `filled` are the symbols that must not be 0, with the place of that.
    `required` is told what code states of numbers that only a run knows, with what a run says else, and tells
    whether the program says so; `stated` is asked whether code at a branch raises on one of its sides, and
    `decide` gives what the example says where code decides by such a number.
    With `keeps_whole` a composite runs that the program has as one operator. Inside `kernels` statements are
    PyTorch's own, which it makes again in every run.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.bases: dict[str, Any] = {}
        self.names: dict[Any, str] = {}
        self.decisions: list[Decision] = []
        self.where: Callable[[], Any] = lambda: None
        self.filled: dict[Any, Any] = {}
        self.required: Callable[[SymBool, str | None], bool] = lambda *_: False
        self.stated: Callable[[FrameType], tuple[bool, str] | None] = lambda _: None
        self.decide: Callable[[Any], Any] = lambda _: None
        self._in_kernel = False
        self.keeps_whole = False

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and note what that decided.

        Whether a size is 1 inside a composite that is kept whole is asked again in every run: a size that is
        not 1 rules nothing out.
        """
        if self.keeps_whole and _asks_for_one(orig_expr):
            with self.suppress_guards():
                result = super().evaluate_expr(orig_expr, *args, **kwargs)
            if bool(result) is not isinstance(orig_expr, sympy.Eq):
                return result
        known = len(self.guards)
        try:
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
        except UnknownSize as error:
            if (stated := self._stated(orig_expr)) is not None:
                return stated
            if (decided := self.decide(orig_expr)) is not None:
                return self._learnt(orig_expr, sympy.sympify(decided))
            error.whence_names = self.names  # type: ignore[attr-defined]
            raise
        self._note(known, orig_expr)
        return result

    def _stated(self, asked: Any) -> Any:
        """The answer with which code goes on that raises with the other, and to which every run is held."""
        branching = None if self._in_kernel else _branching()
        found = None if branching is None else self.stated(branching)
        if found is None:
            return None
        wanted, otherwise = found
        holds = asked if wanted else sympy.Not(asked)
        if not self.required(self.create_symboolnode(holds), otherwise):
            return None
        super().guard_or_defer_runtime_assert(holds, otherwise)
        return sympy.sympify(wanted)

    def _learnt(self, asked: Any, answer: Any) -> Any:
        """An answer; of a whole number it is what the symbol stands for from now on."""
        equal = sympy.Eq(asked, answer) if answer.is_Integer else asked
        is_whole = all(symbol.is_integer for symbol in equal.free_symbols)
        if isinstance(equal, sympy.Eq) and is_whole and answer is not sympy.false:
            super().guard_or_defer_runtime_assert(equal, "the example decides")
        return answer

    def guard_or_defer_runtime_assert(  # type: ignore[override]
        self, orig_expr: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Require, as `torch._check` does, and note it."""
        known = len(self.guards)
        if self._is_for_a_run(orig_expr):
            self.required(self.create_symboolnode(orig_expr), None)
        result = super().guard_or_defer_runtime_assert(orig_expr, *args, **kwargs)
        self._note(known, orig_expr)
        return result

    def create_symbol(self, val: Any, *args: Any, **kwargs: Any) -> Any:
        """A symbol for a size; yes and no are numbers to AOT Autograd, and none that vary."""
        return sympy.Integer(val) if isinstance(val, bool) else super().create_symbol(val, *args, **kwargs)

    def _is_for_a_run(self, found: Any) -> bool:
        """Whether code states by `torch._check` what nothing known before the run decides."""
        if self._in_kernel or not free_unbacked_symbols(found) or not _is_statement():
            return False
        return self._maybe_evaluate_static(found) is None

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Inside the block kernels run on symbols."""
        before, self._in_kernel = self._in_kernel, True
        try:
            yield
        finally:
            self._in_kernel = before

    def _note(self, known: int, asked: Any) -> None:
        for guard in self.guards[known:]:
            self.decisions.append(Decision(guard.expr, asked, self.where()))

    def base(self, name: str, value: int, low: int, high: int | None, *, yields: bool = False) -> Any:
        """A size between `low` and `high` that is `value` in the example; the same for the same name."""
        if name not in self.bases:
            bounds = ValueRanges(low, int_oo if high is None else high)
            limits = StrictMinMaxConstraint(vr=bounds, warn_only=False)
            symbol = self.create_symbol(value, _Named(name, yields), DimDynamic.DYNAMIC, limits)
            self.bases[name], self.names[symbol] = symbol, name
        return self.create_symintnode(self.bases[name], hint=value)

    def say_where(self, texts: Mapping[str, str]) -> None:
        """Say in PyTorch's spelling where sizes come from, by name: its exported programs check them there.

        What they have no place for is a constant to them, of which they check nothing.
        """
        constant: Any = importlib.import_module("torch._dynamo.source").ConstantSource
        for symbol, name in self.names.items():
            self.var_to_sources[symbol] = [_Named(texts[name]) if name in texts else constant(name)]

    def number(self, name: str, value: int, low: int | None, high: int | None) -> Any:
        """An input that is a whole number, `value` in the example."""
        symbol = self.create_symbol(
            value, _Named(name, True), DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self.bases[name], self.names[symbol] = symbol, name
        bounds = ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)
        self.var_to_range[symbol] &= bounds
        return self.create_symintnode(symbol, hint=value)

    def symint(self, symbol: Any) -> Any:
        """The number that a symbol of a run stands for."""
        return self.create_symintnode(symbol, hint=None)

    def is_free(self, symbol: Any) -> bool:
        """Whether a symbol stands for itself still, and not for a number or for other symbols."""
        return bool(self.replace(symbol) == symbol)

    def with_one(self, size: Any, symbol: Any) -> int:
        """The number that a size of the example would be if this symbol were 1."""
        if not isinstance(size, SymInt):
            return int(size)
        found = self.replace(size.node.expr).xreplace({**self.backed_var_to_val, symbol: sympy.Integer(1)})
        return int(found)

    def rule_out_one(self, symbol: Any, place: Any) -> None:
        """Require of a symbol, which is not 1 in the example, that it is not 1; `place` says where."""
        before, self.where = self.where, lambda: place
        try:
            self.evaluate_expr(sympy.Ne(symbol, 1))
        finally:
            self.where = before

    def admit(self, name: str, number: int) -> None:
        """Require no more what rules out that a size is this number: exported programs ask for it."""
        known = {self.bases[name]: sympy.Integer(number)}
        self.guards[:] = [row for row in self.guards if row.expr.xreplace(known) is not sympy.false]

    def require_nonzero(self, divisor: Any) -> None:
        """Require of a divisor that it is not 0: C++ gives infinity then, and Python an error."""
        found = self.replace(divisor.node.expr).replace(ToFloat, lambda whole: whole)
        self.evaluate_expr(sympy.Ne(sympy.nsimplify(found), 0))

    def require_filled(self, *sizes: Any) -> None:
        """Note that sizes must not be 0; symbols count as positive, so a condition would say nothing."""
        for found in [self.replace(size.node.expr) for size in sizes if isinstance(size, SymInt)]:
            for symbol in found.free_symbols:
                if found.xreplace({symbol: sympy.Integer(0)}) == 0 and self.range_of(symbol)[0] < 1:
                    self.filled.setdefault(symbol, self.where())

    def range_of(self, symbol: Any) -> tuple[int, int | None]:
        """The smallest and the largest value that a symbol may have; None for no largest."""
        bounds = self.var_to_range[symbol]
        return int(bounds.lower), None if bounds.upper == int_oo else int(bounds.upper)

    def spelled(self, found: Any) -> str:
        """An expression over the names of sizes."""
        return spell(found, self.names)

    def linear(self, symbol: Any) -> tuple[Any, int, int] | None:
        """What a symbol stands for: one other, how often it is taken, and what is added; or None."""
        return linear(self.replace(symbol))

    def cause_of(self, symbol: Any) -> Decision | None:
        """The decision that made a symbol stand for something else."""
        about = [row for row in self.decisions if symbol in row.condition.free_symbols]
        return next((row for row in about if isinstance(row.condition, sympy.Eq)), None)

    def found(self) -> Iterator["Found"]:
        """The decisions that are not said already by what symbols stand for, nor by a stronger one."""
        rows = [(row, self.replace(row.condition)) for row in self.decisions]
        kept = [(row, condition) for row, condition in rows if condition not in (sympy.true, sympy.false)]
        seen: list[Any] = []
        for at, (row, condition) in enumerate(kept):
            bounds = [other for there, (_, other) in enumerate(kept) if there != at and other not in seen]
            if _implied(condition, bounds):
                seen.append(condition)
            else:
                names = frozenset(self.names[symbol] for symbol in condition.free_symbols)
                yield Found(row, names, spell(condition, self.names), self._in_words(condition), condition)

    def _in_words(self, condition: Any) -> str:
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
            if _divisor(condition) is not None:
                return f"a multiple of {_divisor(condition)}"
        return f"such that {spell(condition, self.names)}"


_FRAMES = 12
_STATES = torch._check_with.__code__


_TRUTHS = (SymBool.__bool__.__code__, SymInt.__bool__.__code__, SymFloat.__bool__.__code__)


def _running(codes: Sequence[CodeType]) -> FrameType | None:
    """The innermost frame that runs one of these; None where none of those nearby does."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code in codes:
            return frame
        frame = frame.f_back
    return None


def _is_statement() -> bool:
    """Whether it is `torch._check` that requires something now."""
    return _running((_STATES,)) is not None


def _branching() -> FrameType | None:
    """The code that asks by itself whether a condition on sizes holds; None where it is asked elsewhere."""
    frame = _running(_TRUTHS)
    while frame is not None and frame.f_code in _TRUTHS:
        frame = frame.f_back
    return frame


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


def _divisor(condition: Any) -> int | None:
    """The number of which a condition says that the one size in it is a multiple."""
    left, right = condition.args
    if not isinstance(condition, sympy.Eq) or right != 0 or type(left).__name__ not in ("Mod", "PythonMod"):
        return None
    value, divisor = left.args
    return int(divisor) if value.is_Symbol and divisor.is_Integer else None


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


def _implied(condition: Any, others: Sequence[Any]) -> bool:
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


def are_same_at(left: Any, right: Any, at: Mapping[str, int]) -> bool:
    """Whether sizes of two environments are the same, where some, by name, are these numbers."""
    numbers = {sympy.Symbol(name, integer=True): number for name, number in at.items()}
    try:
        found, other = (_over_names(size).xreplace(numbers) for size in (left, right))
        return bool(found == other or sympy.expand(found - other) == 0)
    except (ArithmeticError, TypeError):  # divided by 0, or yes and no
        return False


def number_at(size: Any, at: Mapping[str, int]) -> int | None:
    """What a size is where some, by name, are these numbers; None where others count, too."""
    numbers = {sympy.Symbol(name, integer=True): sympy.Integer(number) for name, number in at.items()}
    found = _over_names(size).xreplace(numbers)
    return int(found) if found.is_number else None


def _over_names(size: Any) -> Any:
    """A size over symbols that are called as sizes are."""
    if not hasattr(size, "node"):
        return sympy.sympify(size)
    names, found = size.node.shape_env.names, size.node.expr
    symbols = {each: sympy.Symbol(names.get(each, str(each)), integer=True) for each in found.free_symbols}
    return found.xreplace(symbols)


def unknown_condition(error: UnknownSize) -> tuple[str, list[str]]:
    """What could not be decided, and the names in it of what only a run gives."""
    names: dict[Any, str] = getattr(error, "whence_names", {})
    found = [names.get(symbol, str(symbol)) for symbol in free_unbacked_symbols(error.cond)]
    return spell(error.cond, names), found


def spell(found: Any, names: dict[Any, str]) -> str:
    """A sympy expression as Python source."""
    text: str = _Printer(names).doprint(found)
    return text


class _Printer(PythonPrinter):
    """Prints expressions as Python would evaluate them, with names of our own for symbols."""

    def __init__(self, names: dict[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802 - sympy finds printers by the name of the class
        return self._names.get(symbol, str(symbol))

    def _print_Float(self, number: Any) -> str:  # noqa: N802
        return repr(float(number))


@dataclass(frozen=True)
class Found:
    """A decision that still says something when all is known: over which names, as source, and in words."""

    decision: Decision
    names: frozenset[str]
    text: str
    words: str
    condition: Any

    @property
    def divisor(self) -> int | None:
        """The number that a size must be a multiple of, where that is what was found."""
        return _divisor(self.condition) if isinstance(self.condition, sympy.Eq) else None


def _asks_for_one(asked: Any) -> bool:
    """Whether somebody asks if a size, or a stride that is a multiple of it, is that of 1."""
    if not isinstance(asked, (sympy.Eq, sympy.Ne)) or not asked.rhs.is_Integer or not asked.rhs:
        return False
    return bool((asked.lhs / asked.rhs).is_Symbol)

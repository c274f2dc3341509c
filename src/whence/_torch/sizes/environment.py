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
from dataclasses import dataclass, replace
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
from torch.utils._sympy.value_ranges import ValueRanges

from whence._torch.sizes.expressions import (
    asks_for_one,
    divisor,
    in_words,
    is_implied,
    linear,
    spell,
    value_where,
)


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


@dataclass(frozen=True)
class SizeListener:
    """Who is asked where sizes decide.

    `where` gives the place of a decision. `required` is told what code states of numbers that only a run
    knows, with what a run says else, and tells whether the program says so; `stated` is asked whether code at
    a branch raises on one of its sides, and `decide` gives what the example says where code decides by such
    a number.
    """

    where: Callable[[], object] = lambda: None
    required: Callable[[SymBool, str | None], bool] = lambda *_: False
    stated: Callable[[FrameType], tuple[bool, str] | None] = lambda _: None
    decide: Callable[[Any], Any] = lambda _: None


class SizeEnvironment(ShapeEnv):
    """The symbols of one capture, their names, and what was decided by them.

    `bases` are the symbols of inputs by name, `names` says how every symbol is spelled; `filled` are the
    symbols that must not be 0, with the place of that. `listener` is asked where sizes decide. Inside
    `kept_whole` a composite runs that the program has as one operator, inside `kernels` statements are
    PyTorch's own, which it makes again in every run.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.bases: dict[str, Any] = {}
        self.names: dict[Any, str] = {}
        self.decisions: list[Decision] = []
        self.filled: dict[Any, Any] = {}
        self.listener = SizeListener()
        self._in_kernel = False
        self._keeps_whole = False

    def listen(self, **changed: Any) -> None:
        """From now on some questions go to others."""
        self.listener = replace(self.listener, **changed)

    def end(self) -> None:
        """Ask nobody any more: PyTorch keeps the last environments, and whoever they know."""
        self.listener = SizeListener()

    @contextmanager
    def listening(self, **changed: Any) -> Iterator[None]:
        """Inside the block some questions go to others."""
        before = self.listener
        self.listen(**changed)
        try:
            yield
        finally:
            self.listener = before

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and note what that decided.

        Whether a size is 1 inside a composite that is kept whole is asked again in every run: a size that is
        not 1 rules nothing out.
        """
        if self._keeps_whole and asks_for_one(orig_expr):
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
            if (decided := self.listener.decide(orig_expr)) is not None:
                return self._learnt(orig_expr, sympy.sympify(decided))
            error.whence_names = self.names  # type: ignore[attr-defined]
            raise
        self._note(known, orig_expr)
        return result

    def _stated(self, asked: Any) -> Any:
        """The answer with which code goes on that raises with the other, and to which every run is held."""
        branching = None if self._in_kernel else _branching()
        found = None if branching is None else self.listener.stated(branching)
        if found is None:
            return None
        wanted, otherwise = found
        holds = asked if wanted else sympy.Not(asked)
        if not self.listener.required(self.create_symboolnode(holds), otherwise):
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
            self.listener.required(self.create_symboolnode(orig_expr), None)
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

    @contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Inside the block a composite runs that is one operator of the program."""
        self._keeps_whole = True
        try:
            yield
        finally:
            self._keeps_whole = False

    def _note(self, known: int, asked: Any) -> None:
        for guard in self.guards[known:]:
            self.decisions.append(Decision(guard.expr, asked, self.listener.where()))

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
        self.bound(symbol, low, high)
        return self.create_symintnode(symbol, hint=value)

    def bound(self, symbol: Any, low: int | None, high: int | None) -> None:
        """Let a symbol be no less and no more than these, where they are given."""
        self.var_to_range[symbol] &= ValueRanges(
            -int_oo if low is None else low, int_oo if high is None else high
        )

    def is_free(self, symbol: Any) -> bool:
        """Whether a symbol stands for itself still, and not for a number or for other symbols."""
        return bool(self.replace(symbol) == symbol)

    def with_one(self, size: Any, symbol: Any) -> int:
        """The number that a size of the example would be were this symbol 1; raises `ZeroDivisionError`."""
        if not isinstance(size, SymInt):
            return int(size)
        found = self.replace(size.node.expr).xreplace({**self.backed_var_to_val, symbol: sympy.Integer(1)})
        return int(found)

    def rule_out_one(self, symbol: Any, place: Any) -> None:
        """Require of a symbol, which is not 1 in the example, that it is not 1; `place` says where."""
        with self.listening(where=lambda: place):
            self.evaluate_expr(sympy.Ne(symbol, 1))

    def admit(self, name: str, number: int) -> None:
        """Require no more what rules out that a size is this number: exported programs ask for it."""
        known = {self.bases[name]: sympy.Integer(number)}
        self.guards[:] = [row for row in self.guards if value_where(row.expr, known) is not sympy.false]

    def require_nonzero(self, divisor: Any) -> None:
        """Require of a divisor that it is not 0: C++ gives infinity then, and Python an error."""
        found = self.replace(divisor.node.expr).replace(ToFloat, lambda whole: whole)
        self.evaluate_expr(sympy.Ne(sympy.nsimplify(found), 0))

    def require_filled(self, *sizes: Any) -> None:
        """Note that sizes must not be 0; symbols count as positive, so a condition would say nothing."""
        for found in [self.replace(size.node.expr) for size in sizes if isinstance(size, SymInt)]:
            for symbol in found.free_symbols:
                empty = value_where(found, {symbol: sympy.Integer(0)})
                if empty in (None, 0) and self.range_of(symbol)[0] < 1:
                    self.filled.setdefault(symbol, self.listener.where())

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
            if is_implied(condition, bounds):
                seen.append(condition)
            else:
                names = frozenset(self.names[symbol] for symbol in condition.free_symbols)
                yield Found(
                    row, names, spell(condition, self.names), in_words(condition, self.names), condition
                )


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


def unknown_condition(error: UnknownSize) -> tuple[str, list[str]]:
    """What could not be decided, and the names in it of what only a run gives."""
    names: dict[Any, str] = getattr(error, "whence_names", {})
    found = [names.get(symbol, str(symbol)) for symbol in free_unbacked_symbols(error.cond)]
    return spell(error.cond, names), found


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
        return divisor(self.condition) if isinstance(self.condition, sympy.Eq) else None

"""Python numbers that only a run knows, and the arithmetic on them as nodes.

An optimizer reads its step count with `.item()` and computes with Python's floats. A number of this kind
takes their place: each operation on it appends a node that does the same with Python's own operator, so that
a run computes what Python would. To PyTorch it is a `torch.SymFloat`, which C++ hands through to the
dispatcher; what C++ asks of the object behind one is listed in `_NumberNode`, and documented nowhere.
"""

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import SymFloat, Tensor, fx

from whence._torch.patching import patched
from whence._torch.pytrees import tree_map_only
from whence.errors import Place, StaleCapture

ITEM = torch.ops.aten._local_scalar_dense.default
"""Reads the number of a tensor."""
Append = Callable[[Any, tuple[Any, ...]], fx.Node]
"""Appends a node that calls a function on these arguments."""
Refuse = Callable[..., Exception]
"""Makes the error for a decision that needs the number, or for another need of it, with what to do then."""
Decide = Callable[[Any, tuple[Any, ...]], Any]
"""What is decided by numbers in this capture, yes or no or a whole number; raises where nobody knows."""
_AS_FLOAT = (
    "write tensor.item() for float(tensor), which stays a number of each run; give an operator that takes no "
    'such number float(number), and let the example decide with decide="example"'
)
AS_TEXT = "return or keep the number as it is, and write texts of it, or hand it to NumPy, outside the step"
_MATHEMATICS = (
    "sqrt",
    "pow",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "tanh",
    "fabs",
)
"""Functions of Python's that take a number of this kind as they take another."""


class Unknown(float):
    """Stands for such a number where a kernel that runs on shapes wants one."""

    def __repr__(self) -> str:
        return "float"


@dataclass(frozen=True)
class Arithmetic:
    """How operations on numbers are written down, and what is said where the number itself is needed.

    `known` gives what a number is now, where that is known.
    """

    append: Append
    refuse: Refuse
    decide: Decide | None = None
    known: Callable[[Any], Any] | None = None

    def number(self, node: fx.Node) -> "RecordedNumber":
        node.meta["val"] = Unknown(1.0)
        return RecordedNumber(_NumberNode(self, node))

    def computed(self, target: Any, *operands: Any) -> "RecordedNumber":
        """The number that a function gives for these; raises `ZeroDivisionError` where Python would."""
        if target in _DIVISIONS and self._is_zero(operands[-1]):
            raise ZeroDivisionError("division by zero")
        return self.number(self.append(target, tuple(map(as_node, operands))))

    def _is_zero(self, number: Any) -> bool:
        """Whether a number is zero, of which nobody asks where it is another now."""
        if not is_recorded(number):
            return bool(number == 0)
        now = None if self.known is None else self.known(as_node(number))
        return now == 0 and self.decided(operator.eq, number, 0)

    def is_whole(self, number: Any) -> bool:
        """Whether a number is one of Python's integers, and makes tensors of integers."""
        return _is_whole(as_node(number), self.known or (lambda _: None))

    def decided(self, target: Any, *operands: Any) -> Any:
        """Which way a comparison goes, or which whole number it is."""
        if self.decide is None:
            raise self.refuse(next(as_node(value) for value in operands if is_recorded(value)))
        return self.decide(target, operands)


_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)
_KEEP_WHOLE = (
    *(operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv, operator.neg),
    *(operator.pos, operator.abs, builtins.max, builtins.min, builtins.round),
    *(operator.and_, operator.or_, operator.xor, operator.invert, operator.lshift, operator.rshift),
)
"""Functions that give an integer for integers."""
_MAKE_WHOLE = (math.floor, math.ceil, math.trunc)


def _is_whole(value: Any, known: Callable[[Any], Any]) -> bool:
    """Whether a number of Python's, or of a node, is an integer: by what it is, or by how it is computed."""
    found = known(value) if isinstance(value, fx.Node) else value
    if found is not None or not isinstance(value, fx.Node):
        return isinstance(found, int)
    if value.target is ITEM:
        held: Any = value.args[0]
        return not held.meta["val"].dtype.is_floating_point
    if value.target in _MAKE_WHOLE or (value.target is round and len(value.args) == 1):
        return True
    return value.target in _KEEP_WHOLE and all(_is_whole(operand, known) for operand in value.args)


_OF_NUMPY = {
    **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv},
    **{"floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow},
}
"""What a float of NumPy's does with such a number, which Python does, too."""


class _NumberNode:
    """What C++ asks of a number: nothing of it is known."""

    def __init__(self, arithmetic: Arithmetic, node: fx.Node) -> None:
        self.arithmetic = arithmetic
        self.node = node

    def is_int(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def guard_float(self, _file: builtins.str, _line: int) -> float:
        raise self.arithmetic.refuse(self.node, _AS_FLOAT)

    def _graph_repr(self) -> builtins.str:
        return f"the number {self.node.name}"

    str = _graph_repr  # PyTorch's profiler writes what operators were given


def _operand(value: object) -> bool:
    return isinstance(value, (int, float, RecordedNumber))


def _forward(target: Any, way: Callable[..., Any] = Arithmetic.computed) -> Any:
    """The method that has `target` of a number, and of another one where it takes two."""

    def compute(self: "RecordedNumber", *other: Any) -> Any:
        return (
            way(self.node.arithmetic, target, self, *other) if all(map(_operand, other)) else NotImplemented
        )

    return compute


def _backward(target: Any) -> Any:
    def compute(self: "RecordedNumber", other: Any) -> Any:
        return self.node.arithmetic.computed(target, other, self) if _operand(other) else NotImplemented

    return compute


def _compared(target: Any) -> Any:
    return _forward(target, Arithmetic.decided)


def _of_bits(target: Any) -> tuple[Any, Any]:
    """The methods that have `target` of whole numbers, with such a number first, and second."""

    def compute(self: "RecordedNumber", *operands: Any) -> Any:
        arithmetic = self.node.arithmetic
        are_whole = all(map(_operand, operands)) and all(map(arithmetic.is_whole, operands))
        return arithmetic.computed(target, *operands) if are_whole else NotImplemented

    def forward(self: "RecordedNumber", *other: Any) -> Any:
        return compute(self, self, *other)

    def backward(self: "RecordedNumber", other: Any) -> Any:
        return compute(self, other, self)

    return forward, backward


class RecordedNumber(SymFloat):
    """A number that a node gives; whatever would need to know it raises."""

    __add__, __radd__ = _forward(operator.add), _backward(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _backward(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _backward(operator.mul)
    __mod__, __rmod__ = _forward(operator.mod), _backward(operator.mod)
    __rpow__ = _backward(operator.pow)
    (__and__, __rand__), (__or__, __ror__) = _of_bits(operator.and_), _of_bits(operator.or_)
    (__xor__, __rxor__), __invert__ = _of_bits(operator.xor), _of_bits(operator.invert)[0]
    (__lshift__, __rlshift__), (__rshift__, __rrshift__) = map(_of_bits, (operator.lshift, operator.rshift))
    __truediv__, __rtruediv__ = _forward(operator.truediv), _backward(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _backward(operator.floordiv)
    __neg__, __pos__, __abs__ = _forward(operator.neg), _forward(operator.pos), _forward(operator.abs)

    __round__, __floor__, __ceil__ = _forward(round), _forward(math.floor), _forward(math.ceil)
    __trunc__ = _forward(math.trunc)

    def _needed(self, *_others: object) -> Any:
        raise self.node.arithmetic.refuse(self.node.node, AS_TEXT)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        return _forward(operator.pow)(self, other) if modulus is None else self._needed()

    def __bool__(self) -> bool:
        return self.node.arithmetic.decided(operator.truth, self)  # type: ignore[no-any-return]

    def __index__(self) -> int:
        if not self.node.arithmetic.is_whole(self):
            raise TypeError("'float' object cannot be interpreted as an integer")
        return self.node.arithmetic.decided(operator.index, self)  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return hash(operator.index(self)) if self.node.arithmetic.is_whole(self) else self._needed()

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    __lt__, __le__, __gt__ = _compared(operator.lt), _compared(operator.le), _compared(operator.gt)
    __ge__, __eq__, __ne__ = _compared(operator.ge), _compared(operator.eq), _compared(operator.ne)

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        target = _OF_NUMPY.get(function.__name__)
        if target is None or method != "__call__" or options or not all(map(_operand, operands)):
            return self._needed()
        return self.node.arithmetic.computed(target, *operands)

    __int__, __float__ = _forward(int, Arithmetic.decided), _forward(float, Arithmetic.decided)
    is_integer = as_integer_ratio = hex = __sym_max__ = __sym_min__ = __sym_int__ = _needed
    __str__ = __repr__ = __format__ = __array__ = conjugate = _needed
    real, imag = property(_needed), property(_needed)
    __class__ = property(lambda self: int if self.node.arithmetic.is_whole(self) else float)
    """What `isinstance` asks for, of a number that the step takes for one of Python's."""
    __reduce_ex__ = _needed

    def __getattr__(self, name: str) -> Any:
        kind = object if name.startswith("_") or name == "node" else self.__class__
        if not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return self._needed if callable(getattr(kind, name)) else self._needed()

    def __copy__(self) -> "RecordedNumber":
        return self

    def __deepcopy__(self, _memo: object) -> "RecordedNumber":
        return self


def is_recorded(value: object) -> bool:
    """Whether a value is such a number; C++ gives one back as a bare `SymFloat`."""
    return isinstance(value, SymFloat) and isinstance(value.node, _NumberNode)


def as_recorded(value: Any) -> Any:
    """The value; a number that came through C++ as one that writes down what is computed of it."""
    return RecordedNumber(value.node) if type(value) is SymFloat and is_recorded(value) else value


def as_node(value: Any) -> Any:
    """The node behind such a number, or the value."""
    return value.node.node if is_recorded(value) else value


def holds_recorded(values: Any) -> bool:
    """Whether such a number is among the arguments of an operation, also in lists."""
    for value in values:
        if is_recorded(value) or (type(value) in (list, tuple) and holds_recorded(value)):
            return True
    return False


def without_recorded(arguments: Any) -> Any:
    """Arguments with a stand-in in the place of every such number."""
    return tree_map_only(SymFloat, _stand_in, arguments)


def _stand_in(value: Any) -> Any:
    if not is_recorded(value):
        return value
    return 1 if value.node.arithmetic.is_whole(value) else Unknown(1.0)


def tensor_of(data: Any, **options: Any) -> Tensor:
    """`torch.tensor` of numbers that are written down, alone or in lists: C++ would ask for each."""
    if type(data) in (list, tuple):
        return torch.stack([tensor_of(part, **options) for part in data])
    if type(data) is bool:
        options.setdefault("dtype", torch.bool)
    if type(data) is int or (is_recorded(data) and data.node.arithmetic.is_whole(data)):
        options.setdefault("dtype", torch.int64)
    return torch.scalar_tensor(data, **options)


def stays(
    found: object, expected: Any, asked: str, module: str | None = None, line: str | None = None
) -> None:
    """A node of a program in which values decided: raises `StaleCapture` where they decide otherwise."""
    answer = bool(found) if isinstance(expected, bool) else found
    if not are_alike(answer, expected):
        now, before = _answer_in_words(answer), _answer_in_words(expected)
        raise StaleCapture(
            f"a branch goes another way: {asked} is {now}, and was {before} at capture",
            where=Place(module, line),
            why="the program holds what comes after one way only",
            remedy="capture again: from here on the other way is taken; a guarded program keeps one for each "
            "way with on_violation='recapture'",
        )


def contents(tensor: Tensor) -> Any:
    """The numbers of a tensor, as Python has them."""
    return tensor.tolist()


def sizes_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


OF_DECISIONS = frozenset({stays, contents, sizes_of})
"""Functions in programs that only look."""


def are_alike(left: Any, right: Any) -> bool:
    """Whether numbers, alone or in lists, are the same: NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(right, (list, tuple)):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(are_alike(*pair) for pair in pairs)
    return repr(left) == repr(right)


_SHOWN = 60


def _answer_in_words(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_OF_PYTHON = ("_operator", "math", "builtins")


def evaluated(value: Any, known: Mapping[fx.Node, Any]) -> Any:
    """What arithmetic on numbers gives, where its inputs are known; else None."""
    if not isinstance(value, fx.Node) or value in known:
        return known.get(value) if isinstance(value, fx.Node) else value
    if value.op != "call_function" or value.target.__module__ not in _OF_PYTHON:
        return None
    operands = [evaluated(operand, known) for operand in value.args]
    return None if None in operands else value.target(*operands)  # type: ignore[operator]


@contextmanager
def mathematics_recorded() -> Iterator[None]:
    """Functions of `math`, and `max` and `min`, write down what they do with such numbers."""
    with ExitStack() as active:
        for name in _MATHEMATICS:
            active.enter_context(patched(math, name, _on_numbers(getattr(math, name))))
        for name in ("max", "min"):
            active.enter_context(patched(builtins, name, _among_numbers(getattr(builtins, name))))
        yield


def _among_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, which would ask which number is the larger one."""

    @wraps(function)
    def chosen(*operands: Any, **options: Any) -> Any:
        if (
            len(operands) < 2
            or options
            or not any(map(is_recorded, operands))
            or not all(map(_operand, operands))
        ):
            return function(*operands, **options)
        number: Any = next(filter(is_recorded, operands))
        return number.node.arithmetic.computed(function, *operands)

    return chosen


def _on_numbers(function: Callable[..., float]) -> Callable[..., Any]:
    @wraps(function)
    def computed(*operands: Any) -> Any:
        operands = tuple(value.item() if isinstance(value, Tensor) else value for value in operands)
        number: Any = next(filter(is_recorded, operands), None)
        if number is None:
            return function(*operands)
        return number.node.arithmetic.computed(function, *operands)

    return computed

"""What a node calls, by name and back: registered operators, and a fixed table of other functions."""

import math
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from whence._torch.operators.schemas import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    higher_order_named,
    operator_named,
)
from whence._torch.sizes.numbers import contents, sizes_of, stays, tensor_of

_OF_OPERATOR = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "inv", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "lshift", "rshift", "getitem"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "index"),
    "truth",
)
_OF_MATH = (
    *("floor", "ceil", "trunc", "sqrt", "pow", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos"),
    *("tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "fabs"),
    *("fmod", "hypot", "isnan", "isinf", "isfinite", "copysign", "degrees", "radians", "prod", "fsum"),
)
_OF_TORCH = (
    *("sym_int", "sym_float", "sym_max", "sym_min", "sym_ite", "sym_not", "sym_sqrt", "sym_sum"),
    "sym_fresh_size",
)
_OF_PYTHON = {"round": round, "max": max, "min": min, "abs": abs, "int": int, "float": float, "bool": bool}

FUNCTIONS: Mapping[str, Any] = MappingProxyType(
    {
        **{f"operator.{name}": getattr(operator, name) for name in _OF_OPERATOR},
        **{f"math.{name}": getattr(math, name) for name in _OF_MATH},
        **{f"torch.{name}": found for name in _OF_TORCH if (found := getattr(torch, name, None))},
        **{f"builtins.{name}": found for name, found in _OF_PYTHON.items()},
        **{f"whence.{found.__name__}": found for found in (contents, sizes_of, stays, tensor_of)},
    }
)
"""Functions, none of them an operator, that a node may call."""
_NAMES: Mapping[Any, str] = MappingProxyType({found: name for name, found in FUNCTIONS.items()})


def target_name(target: Any) -> list[str] | None:
    """How a file calls what a node calls; None for what it cannot name."""
    if isinstance(target, OpOverload):
        packet, _, overload = str(target).removeprefix(f"{target.namespace}.").rpartition(".")
        return ["operator", target.namespace, packet, overload]
    if isinstance(target, OpOverloadPacket):
        namespace, _, packet = str(target).partition(".")
        return ["operator", namespace, packet]
    if isinstance(target, HigherOrderOperator):
        return ["higher order", target.name()] if higher_order_named(target.name()) is target else None
    name = _NAMES.get(target)
    return None if name is None else ["function", name]


def target_named(said: list[str]) -> Any:
    """What a file names; None where nothing of that name may be called in this process."""
    match said:
        case ["operator", str(namespace), str(packet), *rest] if len(rest) < 2:
            return operator_named(namespace, packet, *rest)
        case ["higher order", str(name)]:
            return higher_order_named(name)
        case ["function", str(name)]:
            return FUNCTIONS.get(name)
    return None

"""Expressions of sizes, computed on proxies."""

import math
from typing import Any

from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def interpreted(known: dict[Any, fx.Proxy], found: Any) -> Any:
    """The proxy of an expression, given those of its symbols."""
    return sympy_interp(_OnNodes, known, found)


class _OnNodes(PythonReferenceAnalysis):
    """Operations on proxies: Python's own functions, which do not take them, become calls."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, _dtype: object) -> Any:
        return _called(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, _dtype: object) -> Any:
        return _called(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, _dtype: object) -> Any:
        return _called(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, _dtype: object) -> Any:
        return _called(round, x)


def _called(function: Any, proxy: Any) -> Any:
    return proxy.tracer.create_proxy("call_function", function, (proxy,), {})

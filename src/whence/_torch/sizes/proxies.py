"""Expressions of sizes, written as nodes."""

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Write = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[tuple[Any, ...], dict[str, Any]]], fx.Node]
"""Appends an operation to a graph: its target and arguments, and these as values."""


def written(known: dict[Any, fx.Node], found: Any, write: Write) -> fx.Node:
    """The node of an expression, given those of its symbols, made of nodes that `write` appends."""
    tracer = _Writing(next(iter(known.values())).graph, write)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in known.items()}
    node: fx.Node = sympy_interp(_OnNodes, proxies, found).node
    return node


class _Writing(fx.proxy.GraphAppendingTracer):
    """Operations on its proxies become nodes."""

    def __init__(self, graph: fx.Graph, write: Write) -> None:
        super().__init__(graph)
        self._write = write

    def create_proxy(  # type: ignore[override]
        self, _kind: str, target: Any, args: Any, kwargs: Any, *_rest: Any, **_options: Any
    ) -> fx.Proxy:
        args, kwargs = self.create_arg(args), self.create_arg(kwargs)
        values: Any = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        return fx.Proxy(self._write(target, args, kwargs, values), self)


class _OnNodes(PythonReferenceAnalysis):
    """Operations on proxies: Python's own functions, which do not take them, become calls."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, _dtype: object) -> Any:
        return _proxy_call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, _dtype: object) -> Any:
        return _proxy_call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, _dtype: object) -> Any:
        return _proxy_call(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, _dtype: object) -> Any:
        return _proxy_call(round, x)


def _proxy_call(function: Any, proxy: Any) -> Any:
    return proxy.tracer.create_proxy("call_function", function, (proxy,), {})

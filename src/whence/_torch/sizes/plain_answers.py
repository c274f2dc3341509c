"""What code of the user's may do with a size as with any number of Python's, and PyTorch's symbols cannot."""

import ast
import gc
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper, cache, partial
from itertools import islice
from types import FrameType, FunctionType, MappingProxyType, MethodType, ModuleType, NoneType
from typing import Any

from torch import SymBool, SymFloat, SymInt

from whence._torch.patching import patched

_THEIRS = frozenset({"torch", "sympy", "whence"})
"""Packages that know what a symbol is."""
_TELLING = frozenset(
    (
        *("print", "write", "debug", "info", "warning", "warn", "error", "exception", "critical", "log"),
        *("warning_once", "warn_once", "info_once", "_assert", "set_description", "set_postfix"),
        *("_check", "_check_with", "_check_tensor_all", "_check_tensor_all_with"),
        *("_check_value", "_check_index", "_check_type", "_check_not_implemented"),
    )
)
"""Functions that write for people."""
_ASKING = frozenset({"callable", "isinstance"})
"""Functions that ask what a message is, whatever it says."""
_TELLERS = frozenset({"logging", "warnings", "traceback", "loguru", "rich", "tqdm"})
"""Packages that do."""
_SPELLERS = frozenset({"__repr__", "__str__", "__format__"})
_PYTHON_S: Mapping[type, type] = MappingProxyType({SymInt: int, SymFloat: float, SymBool: bool})

Place = tuple[int, int]
Span = tuple[Place, Place]


class _CachedCalls:
    """Caches of functions that have been given symbols, which they let go of at the end of the run.

    A cache is there for speed: with a size that varies the function runs, as for numbers that it has not met
    yet. What it then keeps is of this run alone.
    """

    def __init__(self) -> None:
        self._given: dict[int, Any] = {}

    def asks(self, frame: FrameType) -> bool:
        """Whether the hash that code asks for now is that of a call which a cache answers."""
        called = _function_called(frame)
        if isinstance(called, _lru_cache_wrapper):
            self._given[id(called)] = called
        return isinstance(called, _lru_cache_wrapper)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """After the block no cache holds symbols, or what was computed of them."""
        try:
            yield
        finally:
            for each in self._given.values():
                _forget_symbols(each)
            self._given.clear()


def _forget_symbols(cached: Any) -> None:
    """Of what a function keeps, what was computed for numbers stays: it may be drawn, or what others hold."""
    for entries in gc.get_referents(cached):
        if type(entries) is dict and entries is not vars(cached):
            kept = {key: value for key, value in entries.items() if not _has_symbols(key)}
            entries.clear()
            entries.update(kept)


def _has_symbols(key: Any) -> bool:
    return any(map(_has_symbols, key)) if isinstance(key, tuple) else type(key) in _PYTHON_S


def _function_called(frame: FrameType) -> Any:
    """The function that code calls where it is; None where that is not written as a name or an attribute."""
    span = _span_now(frame)
    written = None if span is None else _calls_in(frame.f_code.co_filename).get(span)
    return None if written is None else _function_behind(_stands_for(written.func, frame))


def _span_now(frame: FrameType) -> Span | None:
    """Where what a frame runs is written, from a line and column to another."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end, column, end_column = next(positions)
    if line is None or end is None or column is None or end_column is None:
        return None
    return (line, column), (end, end_column)


@cache
def _calls_in(file: str) -> Mapping[Span, ast.Call]:
    """The calls in a file, by where they are written."""
    return {_span_of(node): node for node in _nodes_of(file) if isinstance(node, ast.Call)}


@cache
def _nodes_of(file: str) -> Sequence[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def _span_of(node: ast.expr | ast.stmt) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _stands_for(written: ast.expr, frame: FrameType) -> Any:
    """What a name or an attribute stands for, looked at without running anything."""
    match written:
        case ast.Name(id=name):
            names = (frame.f_locals, frame.f_globals, frame.f_builtins)
            return next((each[name] for each in names if name in each), None)
        case ast.Attribute(value=holder, attr=name):
            return inspect.getattr_static(_stands_for(holder, frame), name, None)
    return None


def _function_behind(function: Any) -> Any:
    """What a method of whichever kind calls, or a function with some of its arguments."""
    while isinstance(function, MethodType | staticmethod | classmethod | partial):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def _hashed(kind: type, cached: _CachedCalls) -> Callable[[Any], int]:
    """The hash of a symbol: its number's, and its size fixed; not for packages that know it, and caches."""
    for_others: Any = kind.__hash__

    def hashed(self: Any) -> int:
        found, frame = getattr(self.node, "expr", None), sys._getframe(1)
        if found is None or (_package(frame) in _THEIRS and not found.is_number):
            return for_others(self)  # type: ignore[no-any-return]
        is_cached = cached.asks(frame)
        return hash(found if is_cached and not found.is_number else _PYTHON_S[kind](self))

    return hashed


def _divided(self: Any, other: Any) -> tuple[Any, Any]:
    return self // other, self % other


def _divides(self: Any, other: Any) -> tuple[Any, Any]:
    return other // self, other % self


def _inverted(self: Any) -> Any:
    return -self - 1


def _formatted(self: Any, form: str) -> str:
    return format(int(self), form) if form or decides(sys._getframe(1)) else str(self)


def _written(kind: type, name: str) -> Callable[..., str]:
    """How a symbol is written: as the number that it is, where code may decide by that."""
    as_symbol = getattr(kind, name)

    def written(self: Any) -> str:
        if getattr(self.node, "expr", None) is None or not decides(sys._getframe(1)):
            return as_symbol(self)  # type: ignore[no-any-return]
        return str(_PYTHON_S[kind](self))

    return written


def decides(frame: FrameType) -> bool:
    """Whether code that writes a number may decide by what it has written: not where it only tells people."""
    while frame.f_back is not None and (frame.f_code.co_name in _SPELLERS or _package(frame) == "reprlib"):
        frame = frame.f_back  # how a container or an object is written
    code = frame.f_code
    if _package(frame) in _THEIRS | _TELLERS:
        return False
    span = _span_now(frame)
    if span is None:
        return True
    return not (_is_within(span, _told(code.co_filename)) or _is_message(span, frame))


def _is_message(span: Span, frame: FrameType) -> bool:
    """Whether what is written goes into a function that only tells people: `check(fits, f"not {x}")`."""
    calls = _calls_in(frame.f_code.co_filename).items()
    around = (call for place, call in calls if _is_within(span, [place]))
    call = max(around, key=lambda call: (_span_of(call)[0], call.func.end_lineno or 0), default=None)
    if call is None:
        return False
    found = _stands_for(call.func, frame)
    function, given = _function_behind(found), _given_at(span, call, _is_bound(found, call.func, frame))
    if not isinstance(function, FunctionType) or given is None:
        return False
    code = function.__code__
    name = code.co_varnames[given] if isinstance(given, int) and given < code.co_argcount else given
    return isinstance(name, str) and _only_tells(code.co_filename, code.co_firstlineno, name)


def _is_bound(found: Any, written: ast.expr, frame: FrameType) -> bool:
    """Whether a call gives a function, which was found where it is written, the object before the dot."""
    holder = _stands_for(written.value, frame) if isinstance(written, ast.Attribute) else None
    return isinstance(found, FunctionType) and not isinstance(holder, NoneType | ModuleType | type)


def _given_at(span: Span, call: ast.Call, is_bound: bool) -> int | str | None:
    """Where a call gives the text that is written at a place: by position or by name."""
    for place, given in enumerate(call.args):
        if isinstance(given, ast.Starred):
            break
        if _is_text_around(given, span):
            return place + is_bound
    return next((each.arg for each in call.keywords if _is_text_around(each.value, span)), None)


def _is_text_around(given: ast.expr, span: Span) -> bool:
    return isinstance(given, ast.JoinedStr) and _is_within(span, [_span_of(given)])


@cache
def _only_tells(file: str, line: int, name: str) -> bool:
    """Whether a function tells people of an argument, and does nothing else with it, under any name."""
    function = _function_at(file, line)
    if function is None:
        return False
    nodes, names, told = list(ast.walk(function)), [name], _told(file)
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.AsyncFunctionDef) for node in nodes):
        return False
    around = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for each in names:
        reads = [node for node in nodes if isinstance(node, ast.Name) and node.id == each]
        for read in (node for node in reads if isinstance(node.ctx, ast.Load)):
            if not _is_within(_span_of(read), told):
                becomes = _becomes(read, function, around)
                if becomes is None:
                    return False
                names += [becomes] if becomes not in names else []
    return True


def _function_at(file: str, line: int) -> ast.FunctionDef | None:
    functions = (node for node in _nodes_of(file) if isinstance(node, ast.FunctionDef))
    return next((each for each in functions if _first_line(each) == line), None)


def _first_line(function: ast.FunctionDef) -> int:
    return min(function.lineno, *(each.lineno for each in function.decorator_list), function.lineno)


def _becomes(read: ast.AST, function: ast.AST, around: Mapping[ast.AST, ast.AST]) -> str | None:
    """The name under which a message goes on: a variable, or a function that returns it; None for anything
    else that is done with it."""
    match around[read]:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.Call(func=ast.Name(id=name)) if name in _ASKING:
            return name
        case ast.Return() as place:
            inner = _innermost_function(place, around)
            return None if inner is function else inner.name
    return None


def _innermost_function(place: ast.AST, around: Mapping[ast.AST, ast.AST]) -> ast.FunctionDef:
    return place if isinstance(place, ast.FunctionDef) else _innermost_function(around[place], around)


@cache
def _told(file: str) -> Sequence[Span]:
    """Where code of a file tells people something: errors, and calls that only write or log."""
    nodes = _nodes_of(file)
    spans: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Raise | ast.Assert)]
    spans += [node for node in nodes if isinstance(node, ast.Expr) and _tells(node.value)]
    told = [_span_of(each) for each in spans]
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [*told, *(span for function in functions for span in _messages(function, told))]


def _messages(function: ast.AST, told: Sequence[Span]) -> Iterator[Span]:
    """What a function puts in variables that it reads only where it tells people something."""
    nodes = list(ast.walk(function))
    names = [node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
    read = {name.id for name in names if not _is_within(_span_of(name), told)}
    for node in nodes:
        if isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id not in read for target in node.targets
        ):
            yield _span_of(node)


def _is_within(span: Span, others: Sequence[Span]) -> bool:
    return any(first <= span[0] and span[1] <= last for first, last in others)


def _tells(called: ast.expr) -> bool:
    function = called.func if isinstance(called, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in _TELLING


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def as_key(key: Any) -> Any:
    """The key of a dictionary with numbers in the place of symbols, which are known where they are one."""
    if type(key) is tuple:
        return tuple(map(as_key, key))
    return _PYTHON_S[type(key)](key) if type(key) in _PYTHON_S else key


@contextmanager
def symbols_taken_for_numbers() -> Iterator[None]:
    """Inside the block symbols can be keys, be written and copied, divided with a rest and inverted."""
    cached = _CachedCalls()
    with ExitStack() as active:
        active.enter_context(cached.forgetting())
        for kind in _PYTHON_S:
            active.enter_context(patched(kind, "__deepcopy__", lambda self, _: self))
            active.enter_context(patched(kind, "__hash__", _hashed(kind, cached)))
            for name in ("__str__", "__repr__"):
                active.enter_context(patched(kind, name, _written(kind, name)))
        active.enter_context(patched(SymInt, "__divmod__", _divided))
        active.enter_context(patched(SymInt, "__rdivmod__", _divides))
        active.enter_context(patched(SymInt, "__invert__", _inverted))
        active.enter_context(patched(SymInt, "__format__", _formatted))
        yield

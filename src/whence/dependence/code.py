"""What the code of a function tells before it runs: whose it is, which names it uses, what it asks."""

import builtins
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dis import Instruction, get_instructions, opmap
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, lru_cache, partial, partialmethod
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from whence._torch.files import is_standard_library
from whence._torch.plain_values import PLAIN_IN_WHOLE

_NETWORKS = f"{Path(torch.nn.__file__).parent}{os.sep}"
_IMPORT, _LOAD_GLOBAL, _EXTENDED = opmap["IMPORT_NAME"], opmap["LOAD_GLOBAL"], opmap["EXTENDED_ARG"]
_FIXED = ("LOAD_CONST", "LOAD_GLOBAL")
_LOCAL = ("LOAD_FAST", "LOAD_DEREF")
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTE_LOADED, _NOTHING_DONE = ("LOAD_ATTR", "LOAD_METHOD"), ("CACHE", "NOP", "PUSH_NULL")
_IDENTIFIES = frozenset(("id", "hash"))
_NUMBERS = ("int", "float", "bool")
IDENTITY = "is"
"""Stands among the names of code that compares identities."""
APART = "tells apart"
"""Stands among the names of code to which two things that hold the same are not one."""
_WRITING = frozenset(
    (
        *("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem", "add"),
        *("discard", "sort", "reverse", "appendleft", "popleft", "extendleft", "rotate", "__setitem__"),
    )
)
"""Methods that write into containers."""
_ENTRIES_WRITTEN = frozenset({opmap["STORE_SUBSCR"], opmap["DELETE_SUBSCR"]})
_BY_NAME = frozenset({opmap["LOAD_NAME"], opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"]})
BY_TEXT = frozenset(
    (
        *("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "import_module"),
        *("vars", "globals", "__dict__", "modules"),
    )
)
"""Names with which code looks up others that it has as text."""
OF_ENVIRONMENT = frozenset({"environ", "getenv", "putenv", "environb"})
"""Names with which code asks the environment."""
_BY_NAME_OF_MODULE = frozenset({"import_module", "modules"})
_ASKING = frozenset(
    (
        *("id", "hash", "vars", "globals", "locals", "dir", "eval", "exec", "compile", "print", "input"),
        *("open", "__import__", "breakpoint", "memoryview"),
    )
)
"""Builtin functions that look past attributes, or whose effects are outside the model."""
_OF_FRAMES = frozenset(
    {"__traceback__", "tb_frame", "f_back", "f_locals", "f_globals", "gi_frame", "__globals__"}
)
"""Attributes that lead to what callers hold."""
FORBIDDEN = frozenset(id(getattr(builtins, name)) for name in _ASKING - {"print", "compile"})
"""The same functions, under any other name."""
_STEADY = frozenset(
    {
        *("functools", "contextlib", "collections", "typing", "abc", "enum", "inspect", "re", "operator"),
        *("dataclasses", "types", "weakref", "importlib", "warnings", "logging", "numbers", "string", "math"),
        *("cmath", "itertools", "heapq", "bisect", "fractions", "decimal", "statistics", "textwrap", "copy"),
        *("reprlib", "keyword", "ast", "_collections_abc", "_weakrefset", "_py_abc", "contextvars"),
        *("__future__", "typing_extensions", "graphlib", "pathlib", "array", "struct"),
    }
)
"""Modules of Python's whose functions depend on their arguments alone, but for those excepted."""
_ENVIRONMENT = frozenset({"getenv", "__getitem__", "__contains__", "encode", "decode"})
"""Functions of `os` that look at nothing but the environment, which can be compared."""
_FILES = ("stat", "open", "read_text", "read_bytes", "exists", "iterdir", "glob")
_EXCEPTED = frozenset(
    (
        *(("inspect", name) for name in ("currentframe", "stack", "getouterframes", "getframeinfo", "trace")),
        *(("logging", "handle"), ("warnings", "_showwarnmsg"), ("copy", "copy"), ("copy", "deepcopy")),
        *(("pathlib", name) for name in _FILES),
    )
)
_OF_OS = frozenset({"os", "environ", "getenv", "path", "name", "sep", "fspath", "PathLike"})
_NEAR = 12
"""How many callers to look at for an import: `typing` has five where a class body subscripts a type."""


class Code(Enum):
    """Whose code it is."""

    USER = "the user's"
    NETWORK = "of torch.nn, which keeps some state in variables"
    LIBRARY = "Python's"
    ENGINE = "torch's, or made by Python"


def kind_of(code: CodeType, is_user: Callable[[CodeType], bool]) -> Code:
    file = code.co_filename
    if is_standard_library(file):
        return Code.LIBRARY
    if file.startswith(_NETWORKS):
        return Code.NETWORK
    if is_of_dataclass(file, code.co_qualname) or file.startswith("<frozen ") or not is_user(code):
        return Code.ENGINE
    return Code.USER


def is_of_dataclass(file: str, function: str) -> bool:
    """Whether `dataclasses` made a function, of what the class says in its own file."""
    return file == "<string>" and function.startswith("__create_fn__")


def is_of_named_tuple(function: FunctionType) -> bool:
    """Whether `namedtuple` made a function, whose variables are its own."""
    name = function.__globals__.get("__name__")
    return function.__code__.co_filename.startswith("<") and str(name).startswith("namedtuple_")


def is_forbidden(code: CodeType | None, module: str) -> str:
    """What is wrong with using a module, or running this function of it; empty if nothing is."""
    package = module.partition(".")[0]
    if module == "os" and code is not None and code.co_name in _ENVIRONMENT:
        return ""
    if package in sys.stdlib_module_names and package not in _STEADY:
        return f"{module}, which nobody watches"
    if code is not None and (package, code.co_name) in _EXCEPTED:
        return f"{module}.{code.co_name}, which looks or acts outside the model"
    return ""


def asks_environment_alone(module: ModuleType, names: frozenset[str]) -> bool:
    """Whether what code with these names can ask of `os` are environment variables."""
    return module is os and names & vars(os).keys() <= _OF_OS


def is_importing(frame: FrameType) -> bool:
    """Whether a function runs on behalf of an import statement, which looks for files and runs modules."""
    caller, steps = frame.f_back, 0
    while caller is not None and steps < _NEAR:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            return True
        caller, steps = caller.f_back, steps + 1
    return False


def names_in(code: CodeType) -> frozenset[str]:
    """Every name that the code looks up; also those it has as text, where it looks up by text."""
    names = frozenset(code.co_names)
    return names if names.isdisjoint(BY_TEXT) else names.union(texts_in(code))


def compares_identity(code: CodeType) -> bool:
    """Whether code asks of two variables whether they are one object."""
    return not _IDENTIFIES.isdisjoint(code.co_names) or any(
        given.opname.startswith(_LOCAL) for given in _compared(code)
    )


def tells_apart(code: CodeType) -> bool:
    """Whether code writes into containers, or asks whether two things are one that are no constants."""
    if not _WRITING.isdisjoint(code.co_names) or not _ENTRIES_WRITTEN.isdisjoint(code.co_code[::2]):
        return True
    return any(not given.opname.startswith(_FIXED) for given in _compared(code))


def globals_compared(code: CodeType) -> Iterator[tuple[str, int]]:
    """The globals of which code asks whether another thing is the same object, with the lines."""
    for given in _compared(code):
        if given.opname == "LOAD_GLOBAL" and given.positions is not None:
            yield given.argval, given.positions.lineno or code.co_firstlineno


def numbers_matched(code: CodeType) -> Iterator[tuple[str, int]]:
    """The classes of numbers that patterns of code name (`case int():`), with the lines."""
    if bytes([opmap["MATCH_CLASS"]]) not in code.co_code:
        return
    rows = list(get_instructions(code))
    for given, now in zip(rows, rows[2:], strict=False):
        if now.opname == "MATCH_CLASS" and given.argval in _NUMBERS and given.positions is not None:
            yield given.argval, given.positions.lineno or code.co_firstlineno


@lru_cache(maxsize=1024)
def looked_up_in(code: CodeType) -> frozenset[str]:
    """The variables of which code asks for single entries alone, by `get`."""
    found, others = set[str](), set[str]()
    for each in codes_in(code):
        rows = [row for row in get_instructions(each) if row.opname not in _NOTHING_DONE]
        for now, then in pairwise(rows):
            if now.opname in _VARIABLES:
                is_asked = then.opname in _ATTRIBUTE_LOADED and then.argval == "get"
                (found if is_asked else others).add(str(now.argval))
    return frozenset(found - others)


@lru_cache(maxsize=4096)
def _compared(code: CodeType) -> tuple[Instruction, ...]:
    """What loads the second of two objects that code compares."""
    pairs = pairwise(get_instructions(code)) if bytes([opmap["IS_OP"]]) in code.co_code else ()
    return tuple(before for before, now in pairs if now.opname == "IS_OP")


def environment_names(code: CodeType) -> Iterator[str]:
    """The variables that code, and functions written inside it, may ask the environment for."""
    texts = (text for each in codes_in(code) for text in texts_in(each))
    return (text for text in texts if text.isidentifier() and text.isupper())


def texts_in(code: CodeType) -> Iterator[str]:
    """The texts that code has as constants."""
    return (text for text in code.co_consts if isinstance(text, str))


@lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """The names that the code looks up among globals and builtins; attributes are not among them."""
    found = set[str]()
    for operation, argument in _operations(code):
        if operation == _LOAD_GLOBAL:
            found.add(code.co_names[argument >> 1])  # the lowest bit says something else
        elif operation in _BY_NAME:
            found.add(code.co_names[argument])
    return frozenset(found.union(texts_in(code)) if "globals" in found else found)


def globals_within(code: CodeType) -> frozenset[str]:
    """The same of a code and the functions written inside it."""
    return frozenset[str]().union(*map(globals_in, codes_in(code)))


def _operations(code: CodeType) -> Iterator[tuple[int, int]]:
    """What the code runs, with arguments; `dis` makes an object of each, and takes ten times as long."""
    extended = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = low | extended << 8
        extended = argument if operation == _EXTENDED else 0
        yield operation, argument


def builtin_queries(
    code: CodeType, variables: Mapping[str, Any], builtins: Mapping[str, Any]
) -> Iterator[str]:
    """What the code asks that nobody sees."""
    for name in _ASKING.intersection(globals_in(code)):
        if variables.get(name, builtins.get(name)) is builtins.get(name):
            yield f"{code.co_qualname} may call {name}()"
    if frames := _OF_FRAMES.intersection(code.co_names):
        yield f"{code.co_qualname} may look at {min(frames)}"
    if "__getattribute__" in code.co_names and code.co_name != "__getattribute__":
        yield f"{code.co_qualname} looks up attributes past their class"


def imported(code: CodeType, variables: Mapping[str, Any]) -> Iterator[ModuleType]:
    """The modules that the code imports while it runs, or has by their names."""
    if not _BY_NAME_OF_MODULE.isdisjoint(code.co_names):
        named = (sys.modules.get(text) for text in texts_in(code))
        yield from (module for module in named if isinstance(module, ModuleType))
    if _IMPORT not in code.co_code[::2]:
        return
    package = str(variables.get("__package__") or "")
    parents = [package.rsplit(".", count)[0] for count in range(package.count(".") + 1)] if package else []
    for operation, argument in _operations(code):
        if operation == _IMPORT:
            name = code.co_names[argument]
            for spelled in (name, *(f"{parent}.{name}" if name else parent for parent in parents)):
                if isinstance(module := sys.modules.get(spelled), ModuleType):
                    yield module


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def behind(thing: Any) -> tuple[Any, ...]:
    """What is called in the place of a callable that is no function itself, and what it is called with."""
    match thing:
        case MethodType():
            return thing.__func__, thing.__self__
        case partial() | partialmethod():
            return thing.func, *thing.args, *thing.keywords.values()
        case _lru_cache_wrapper():
            return (thing.__wrapped__,)
        case BuiltinFunctionType():
            return () if isinstance(thing.__self__, ModuleType | type) else (thing.__self__,)
    return ()


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    """The defaults of its arguments, those of keywords last."""
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def function_in(held: Any) -> FunctionType | None:
    """The function of a method, a property, or what caches one, as a class holds it."""
    if isinstance(held, classmethod | staticmethod):
        held = held.__func__
    elif isinstance(held, property | cached_property):
        held = held.fget if isinstance(held, property) else held.func
    return held if isinstance(held, FunctionType) else None


def innermost(function: FunctionType) -> FunctionType:
    """The function around which decorators have put others."""
    for _ in range(_MOST_WRAPPERS):
        if not isinstance(inside := function.__dict__.get("__wrapped__"), FunctionType):
            break
        function = inside
    return function


_MOST_WRAPPERS = 100
"""After as many it is one that leads back to itself."""


def fingerprint(function: FunctionType) -> str:
    """What a function runs, from which lines, with which defaults: a text that every process gives it."""
    facts = (
        sys.version_info[:2],
        _facts_of(function.__code__),
        _in_words(function.__defaults__),
        _in_words(function.__kwdefaults__),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def fingerprint_of(code: CodeType, defaults: Any, keywords: Any) -> str:
    """The fingerprint of a function of this code."""
    function = FunctionType(code, {}, argdefs=defaults, closure=tuple(CellType() for _ in code.co_freevars))
    function.__kwdefaults__ = dict(keywords) or None
    return fingerprint(function)


@dataclass(frozen=True, slots=True)
class CodePrint:
    """Stands for what a function ran with a release of PyTorch: it is equal to code with its fingerprint."""

    digest: str
    release: str

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CodePrint):
            return self.digest == other.digest
        return isinstance(other, tuple) and fingerprint_of(*other) == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _facts_of(code: CodeType) -> tuple[Any, ...]:
    return (
        *(code.co_filename, code.co_firstlineno, code.co_linetable, code.co_qualname, code.co_flags),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable),
        *(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        tuple(map(_in_words, code.co_consts)),
    )


def _in_words(value: Any) -> Any:
    """A constant or a default; what is no plain value has words that no other process gives it."""
    match value:
        case CodeType():
            return _facts_of(value)
        case FunctionType():
            return fingerprint(value)
        case tuple() | list():
            return type(value).__name__, [_in_words(each) for each in value]
        case frozenset() | set():
            return type(value).__name__, sorted(repr(_in_words(each)) for each in value)
        case dict():
            return "dict", [(_in_words(key), _in_words(each)) for key, each in value.items()]
        case type():
            return "class", value.__module__, value.__qualname__
    return repr(value) if type(value) in PLAIN_IN_WHOLE else (type(value).__qualname__, id(value))

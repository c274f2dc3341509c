"""Functions of PyTorch's and Python's that code calls by name: does anything else stand in their place?

Nobody who writes a model writes their code, so no guard looks at each. One row says of all names that a
model spells that they are what they were when whence was loaded (`torch.nn.functional.linear = ...` is how
libraries put their own there), and one that no variable of a file covers a name of Python's (`len = ...`).
"""

import builtins
import functools
import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import is_, itemgetter
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import nn

from whence._torch.files import COMPUTING, FUNCTIONS_OF_C, TORCH, is_standard_library
from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.patching import ABSENT, without_patches
from whence.dependence.code import codes_in, function_in
from whence.dependence.snapshots import content_of_cell
from whence.program.arguments.optimizer_arguments import Outside
from whence.tracing.reads.outside.running_code import first_of
from whence.tracing.reads.type_queries import is_answer

_NUMERIC = ("numpy", "numpy.linalg", "numpy.fft")
_MODULES = (
    *(torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.autograd, torch.func),
    *(torch.utils.checkpoint, torch.nn.utils, torch.nn.utils.rnn, torch.distributions.kl, builtins, math),
    *(operator, functools, itertools, *(sys.modules[name] for name in _NUMERIC if name in sys.modules)),
)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_CLASSES: Mapping[str, type] = MappingProxyType(
    {
        _named(kind): kind
        for held in (torch.distributions, torch.distributions.transforms, torch.distributions.kl, nn)
        for kind in vars(held).values()
        if isinstance(kind, type) and (kind is nn.Module or kind.__module__.startswith("torch.distributions"))
    }
)
"""Classes whose methods are compared that ran, or that every model calls: many have the same names."""
_IN_C = MappingProxyType({name: getattr(FUNCTIONS_OF_C, name) for name in dir(FUNCTIONS_OF_C.vf)})
_TABLES: Mapping[str, tuple[Mapping[str, Any], ...]] = MappingProxyType(
    {
        **{each.__name__: (vars(each),) for each in _MODULES},
        **{name: tuple(vars(base) for base in kind.__mro__[:-1]) for name, kind in _CLASSES.items()},
        "torch.Tensor": tuple(vars(base) for base in torch.Tensor.__mro__[:-1]),
        FUNCTIONS_OF_C.__name__: (vars(FUNCTIONS_OF_C), _IN_C),
    }
)
"""Where code finds them: the variables of a file, or what a class and its bases hold."""
_MODULE, _DISTRIBUTIONS = _named(nn.Module), str(Path(torch.distributions.__file__).parent)
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)
_OPERATORS = frozenset(
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    for side in ("", "r", "i")
) | {"__getitem__", "__setitem__", "__neg__", "__invert__", "__eq__", "__ne__", "__lt__", "__gt__"}
"""Methods of tensors that code calls without naming them."""
_COMPUTE_NOTHING = frozenset({"print", "input", "help", "open", "breakpoint", "_", "load", "save", "compile"})
"""What others often put their own in the place of: programs that show things to people, and tools around
models. Methods of a user's have these names, too."""
_UNCHANGED = f"{TORCH}_compile.py"
"""Where functions come from that only keep the compiler from looking into another: when the compiler is
imported, it puts one in the place of `torch.manual_seed`."""


_OF_TABLES = sys.stdlib_module_names | {"torch", "numpy", "typing_extensions"}
"""Packages of objects that PyTorch and Python have under these names, and that can be called."""


def _answering(table: str, name: str) -> Any:
    return next((held[name] for held in _TABLES[table] if name in held), NOTHING)


def _beneath(held: object) -> Any:
    """The function that does the work, of one that only warns, or keeps the compiler away."""
    while isinstance(held, FunctionType) and "__wrapped__" in vars(held):
        if held.__code__.co_filename != _UNCHANGED and "__deprecated__" not in vars(held):
            break
        held = vars(held)["__wrapped__"]
    return held


def _if_own(table: str, held: object) -> Any:
    """A function if it is of whose the table is, `NOTHING` if somebody put another there before whence came,
    and None for all else."""
    package = table.partition(".")[0]
    if isinstance(held, property):
        return held if _if_own(table, held.fget) is held.fget else None
    if isinstance(function := _beneath(held), FunctionType):
        file = function.__code__.co_filename
        is_own = str(function.__globals__.get("__name__")).partition(".")[0] == package
        return held if is_own else None if is_standard_library(file) else NOTHING
    if isinstance(held, type):
        is_own = table == builtins.__name__ or held.__module__.partition(".")[0] == package
        return held if is_own and not issubclass(held, BaseException) else None
    if isinstance(held, _OF_C) or (callable(held) and type(held).__module__.partition(".")[0] == "numpy"):
        return held
    is_put_there = callable(held) and type(held).__module__.partition(".")[0] not in _OF_TABLES
    return NOTHING if is_put_there or isinstance(held, partial) else None


def _own_functions(table: str) -> Mapping[str, Any]:
    rows = ((name, _if_own(table, _answering(table, name))) for name in {*chain(*_TABLES[table])})
    return MappingProxyType({name: own for name, own in rows if own is not None})


_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType({table: _own_functions(table) for table in _TABLES})
"""What there was when whence was loaded."""
_FUNCTIONAL = _OWN["torch.nn.functional"]
_INSIDE = ("torch", "torch.nn.functional", "torch.Tensor")
"""Where the functions of `torch.nn.functional` find what they name."""


class _Name(NamedTuple):
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def own(self) -> Any:
        """What was there when whence was loaded; `NOTHING` where that was no function of theirs."""
        return _OWN[self.table].get(self.name, NOTHING)

    @property
    def is_replaced(self) -> bool:
        """Whether another thing is there, but for what a capture puts there for its time.

        A file of another release may have names that stand for no function here.
        """
        held = _held_by_itself(_answering(self.table, self.name))
        return self.name in _OWN[self.table] and _beneath(held) is not _beneath(self.own)


@dataclass(frozen=True)
class _OwnFunctions:
    """Names in one namespace, compared at once: checks do it before each run.

    In `above`, the namespaces that are asked before, none of the names may be.
    """

    namespace: Mapping[str, Any]
    above: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    own: tuple[Any, ...]

    @classmethod
    def all_of(cls, names: Sequence[_Name]) -> "Iterator[_OwnFunctions]":
        """All of the names that were there when whence was loaded."""
        for table, namespaces in _TABLES.items():
            left = [each for each in names if each.table == table]
            for position, namespace in enumerate(namespaces):
                here = [each for each in left if each.name in namespace]
                left = [each for each in left if each not in here]
                if here:
                    spelled, own = zip(*((each.name, each.own) for each in here), strict=True)
                    yield cls(namespace, namespaces[:position], spelled, own)

    @property
    def is_untouched(self) -> bool:
        """Whether there is what was there."""
        now = map(self.namespace.get, self.names)
        return all(map(is_, now, self.own)) and all(map(self._is_free, self.above))

    def _is_free(self, above: Mapping[str, Any]) -> bool:
        return above.keys().isdisjoint(self.names)


class CalledByName:
    """Collects the names by which a model may call functions of PyTorch's and Python's; `is_user` knows the
    user's code, whose names are collected elsewhere.
    """

    def __init__(self, is_user: Callable[[CodeType], bool]) -> None:
        self._is_user = is_user
        self._of_libraries: set[str] = set()
        self._ran = {_Name(_MODULE, name) for name in _CALLS}
        self._of_files: defaultdict[str, set[str]] = defaultdict(set)

    def function(self, code: CodeType) -> None:
        """Code is about to run: that of `torch.nn.Linear.forward`, for one."""
        if not self._is_user(code):
            self._of_libraries.update(code.co_names)

    def began(self, frame: FrameType) -> bool:
        """Code that is not the user's begins to run; says whether it is enough to have seen it once."""
        code = frame.f_code
        if not code.co_filename.startswith(COMPUTING):
            return True
        self._of_libraries.update(code.co_names)
        if not code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        kinds = type(first_of(frame)).__mro__
        table = next((name for kind in kinds if (name := _named(kind)) in _CLASSES), None)
        if table is not None and code.co_name in _OWN[table]:
            self._ran.add(_Name(table, code.co_name))
        return False  # other classes of them share its methods

    def in_file(self, namespace: Mapping[str, Any], name: str) -> None:
        """Code of a file has a name of Python's."""
        file = namespace.get("__name__")
        if name in _OWN[builtins.__name__] and name not in _COMPUTE_NOTHING and isinstance(file, str):
            self._of_files[file].add(name)

    def guarded_rows(self, spelled: Set[str], held: Iterable[object]) -> Iterator[Outside]:
        """What stands for functions whose names are spelled, and for names of Python's in files.

        `held` are values that code names: functions among them spell names, too. Where something does stand
        for a function already, it is compared for itself.
        """
        words = {*spelled, *self._of_libraries, *_OPERATORS}
        words.update(chain.from_iterable(map(_names_within, map(function_in, held))))
        names = sorted({*self._ran, *chain.from_iterable(map(_leading_to, words - _COMPUTE_NOTHING))})
        yield _guarded_row("replaced functions of PyTorch and Python", replaced, map(str, names))
        if self._of_files:
            files = (f"{file}:{','.join(sorted(names))}" for file, names in sorted(self._of_files.items()))
            yield _guarded_row("variables with names of Python's own", covered, files)
        for each in (each for each in names if each.is_replaced):
            namespace = next(namespace for namespace in _TABLES[each.table] if each.name in namespace)
            yield Outside(
                str(each), namespace, (itemgetter(each.name),), _held_by_itself(namespace[each.name])
            )


def _guarded_row(path: str, look: Callable[..., Any], names: Iterable[str]) -> Outside:
    step = partial(look, names=" ".join(names))
    return Outside(path, sys.modules, (step,), step(sys.modules))


def replaced(_modules: object, names: str) -> tuple[str, ...]:
    """Those of the names, with spaces between them, under which there is another function now."""
    rows, groups = _parsed(names)
    if all(each.is_untouched for each in groups):
        return ()
    return tuple([str(each) for each in rows if each.is_replaced])


def covered(modules: Mapping[str, Any], names: str) -> tuple[str, ...]:
    """Those names of Python's, as `file:name,name file:name`, that are variables of the file now."""
    rows = ((file, name) for file, spelled in _names_by_file(names) for name in spelled)
    return tuple([f"{file}.{name}" for file, name in rows if _is_variable(modules.get(file), name)])


def _is_variable(module: object, name: str) -> bool:
    there = getattr(module, "__dict__", {}).get(name, NOTHING)
    held = there if there is NOTHING else _held_by_itself(there)
    return held is not NOTHING and not is_answer(held)


@lru_cache(maxsize=256)
def _parsed(names: str) -> tuple[tuple[_Name, ...], tuple[_OwnFunctions, ...]]:
    split = (name.rpartition(".") for name in names.split())
    rows = tuple(_Name(table, name) for table, _, name in split if table in _TABLES)
    return rows, tuple(_OwnFunctions.all_of(rows))


@lru_cache(maxsize=256)
def _names_by_file(names: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = (name.rpartition(":") for name in names.split())
    return tuple((file, tuple(spelled.split(","))) for file, _, spelled in rows)


@lru_cache(maxsize=4096)
def _leading_to(spelled: str) -> frozenset[_Name]:
    """The functions of a name, and those that functions of `torch.nn.functional` name themselves."""
    tables = (table for table, own in _OWN.items() if spelled in own and table not in _CLASSES)
    found, waiting = {_Name(table, spelled) for table in tables}, [spelled]
    while waiting:
        for name in _names_within(_FUNCTIONAL.get(waiting.pop())):
            rows = {_Name(table, name) for table in _INSIDE if name in _OWN[table]}
            waiting += () if rows <= found else (name,)
            found |= rows
    return frozenset(found)


def _names_within(function: object) -> Iterator[str]:
    """The names in a function's code, and in that of functions around which it was made."""
    if isinstance(function, FunctionType):
        inner = map(content_of_cell, function.__closure__ or ())
        for each in (function, *(held for held in inner if isinstance(held, FunctionType))):
            yield from chain.from_iterable(code.co_names for code in codes_in(each.__code__))


def _held_by_itself(value: Any) -> Any:
    """What is there when no capture goes on."""
    held = without_patches(value)
    return NOTHING if held is ABSENT else held

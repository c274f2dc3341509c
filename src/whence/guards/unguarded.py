"""What a capture may depend on that no guard watches: said, so that nobody is misled."""

import inspect
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from whence._torch.subclasses.fully_sharded import class_as_written
from whence.dependence.describe import CALLED, function_of
from whence.dependence.lookup import class_attribute
from whence.dependence.observed import Observed
from whence.dependence.values import is_constant
from whence.program import FlatProgram
from whence.program.guards.expectations import (
    Expectation,
    ExpectedConstant,
    ExpectedHolder,
    ExpectedNames,
    ExpectedTensor,
    ExpectedThing,
    Missing,
    Reference,
    inside_of,
)
from whence.program.guards.rows import Guard, Unguarded
from whence.schema import GuardKind


def unguarded(program: FlatProgram, observed: Observed, guards: Sequence[Guard]) -> tuple[Unguarded, ...]:
    """Globals and closures of the functions that ran, insides of objects that cannot be watched."""
    variables = (guard for guard in guards if guard.kind is GuardKind.VARIABLE)
    guarded = {guard.what for guard in variables if not isinstance(guard.expected, ExpectedThing)}
    rows = [row for row in _outside_names(observed, guarded) if row.what not in guarded]
    rows += [*_opaque_objects(guards, guarded), *_own_ways(observed)]
    rows += [*_unguarded_loss(program), *_unguarded_step(program), *_unseen(observed), _CODE_CALLED]
    return tuple(dict.fromkeys(rows))


_LIBRARIES = ("torch.", "whence.")
_IN_PART = (
    "numbers, texts, flags and tensors in it that code names are compared, what else it leads to is not"
)
_CODE_CALLED = Unguarded(
    "functions called from forward",
    "that forward itself and the methods it looks up are the same is guarded, and so are numbers, texts, "
    "flags, tensors and functions that they name, or that functions name which they call, in variables and "
    "on objects, classes and tensors around; what else such an object leads to is not, nor what is called "
    "further on, or closed over by functions of libraries",
)


_OF_FILES = frozenset(
    (
        *("open", "read_text", "read_bytes", "exists", "isfile", "is_file", "isdir", "is_dir", "getmtime"),
        *("listdir", "iterdir", "glob", "scandir", "stat"),
    )
)
_OF_NAMESPACES = frozenset(("eval", "exec", "f_globals", "f_locals", "f_back", "__globals__"))
_UNSEEN = (
    (
        _OF_FILES,
        "files at which code looks",
        "what it found there is part of the program, and nobody looks again",
    ),
    (_OF_NAMESPACES, "what code finds by evaluating, or in namespaces of other code", "no name leads there"),
)
"""Names with which code looks where no guard does: what that is, and why."""


def _unseen(observed: Observed) -> Iterator[Unguarded]:
    for names, what, why in _UNSEEN:
        if words := sorted(names & observed.named):
            yield Unguarded(f"{what} ({', '.join(words)})", why)


_CONTEXT = "context variable"


def _outside_names(observed: Observed, guarded: Container[str]) -> Iterator[Unguarded]:
    for function in _functions(observed):
        try:
            outside = inspect.getclosurevars(function)
        except (TypeError, ValueError):  # a cell that is still empty, or no Python code
            continue
        for where, names in (("global", outside.globals), ("closure", outside.nonlocals)):
            yield from (
                Unguarded(f"{where} {name}", f"{function.__qualname__} reads it; {_IN_PART}")
                for name, value in names.items()
                if not name.startswith("__") and _may_change(value) and f"{_CONTEXT} {name}" not in guarded
            )


def _functions(observed: Observed) -> list[Any]:
    """The Python functions of the user that modules looked up on themselves: forward, and methods."""
    found: dict[int, Any] = {}
    for read in observed.reads:
        function = function_of(read.value) if issubclass(type(read.value), CALLED) and read.is_there else None
        if function is not None and inspect.isfunction(function[0]):
            found.setdefault(id(function[0].__code__), function[0])
    return [function for function in found.values() if not str(function.__module__).startswith(_LIBRARIES)]


def _may_change(value: object) -> bool:
    return not (callable(value) or inspect.ismodule(value) or _is_library_object(value))


def _is_library_object(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in ("logging", "typing", "transformers") and not (
        is_constant(value) or isinstance(value, Tensor)
    )


def _opaque_objects(guards: Sequence[Guard], guarded: Container[str]) -> Iterator[Unguarded]:
    """Whatever a guard can only recognise, and not look into."""
    for guard in guards:
        if type(guard.expected) in _EXPLAINED or f"{_CONTEXT} {guard.what}" in guarded:
            continue
        for found in _references(guard.expected):
            yield Unguarded(
                f"the inside of {guard.what}, {found.text}",
                "objects of this class cannot be watched: that it is the same object is guarded",
            )


_EXPLAINED = frozenset(
    {ExpectedConstant, ExpectedHolder, ExpectedTensor, ExpectedThing, ExpectedNames, Missing}
)
"""What holds no references; nearly all that is expected is of these kinds."""


def _references(expected: Expectation) -> Iterator[Reference]:
    waiting, seen = [expected], set[int]()
    while waiting:
        found = waiting.pop()
        if isinstance(found, Reference):
            yield found
        elif (inside := inside_of(found)) and id(found) not in seen:
            seen.add(id(found))
            waiting += inside


def _own_ways(observed: Observed) -> Iterator[Unguarded]:
    """Attributes that are not looked up one by one where the looking can be seen."""
    for kind in {class_as_written(type(module)) for _, module in observed.modules}:
        if class_attribute(kind, "__getattribute__") is not class_attribute(nn.Module, "__getattribute__"):
            yield Unguarded(
                f"attributes that {kind.__name__} finds in a way of its own",
                "its class has a __getattribute__: values that it computes are not guarded",
            )
    for read in observed.reads:
        if read.name == "__dict__":
            yield Unguarded(
                f"vars() of {type(read.holder).__name__}", f"what {read.source} reads of it cannot be seen"
            )


def _unguarded_loss(program: FlatProgram) -> Iterator[Unguarded]:
    if program.loss_function is not None:
        name = getattr(program.loss_function, "__qualname__", type(program.loss_function).__name__)
        yield Unguarded(
            f"the loss function {name}",
            "what its own code names is guarded: variables, arguments, attributes; what that calls is not",
        )


def _unguarded_step(program: FlatProgram) -> Iterator[Unguarded]:
    if program.step is not None:
        yield Unguarded(
            "what the step reads through objects of libraries written in C, and from files of other packages",
            "variables, attributes and entries of containers are compared when it is bound; what such an "
            "object holds (a table, a large array) is taken as it is",
        )

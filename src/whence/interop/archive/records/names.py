"""What a program knows of things outside it, in a file: classes, functions and variables, by their names.

A file that is read alone leaves all of them names. With a live model, names are looked up among what is
loaded, in dictionaries alone: nothing is imported, and no attribute is asked for that could compute.
"""

import os
import sys
import weakref
from ast import literal_eval
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from operator import attrgetter, itemgetter, methodcaller
from types import CellType, FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.observe.attribute_reads import NOTHING, is_observable, own_attributes
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import Unmade, is_container
from whence.dependence.code import (
    CodePrint,
    fingerprint,
    fingerprint_of,
    function_in,
    globals_in,
    innermost,
    names_in,
)
from whence.dependence.describe import itself
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import content_of_cell
from whence.dependence.values import is_literal
from whence.interop.archive.records.by_name import (
    INSIDE,
    class_name,
    is_found_by_name,
    looked_up,
    name_of,
    namespace,
)
from whence.interop.archive.records.reached import (
    OWN_CLASS,
    Way,
    at_the_end,
    class_of_a_variable,
    reached_from,
)
from whence.program.guards.expectations import ExpectedFunction, Reference
from whence.program.names import InWords, NamedOnly, Said, Unfound
from whence.tracing.reads.held_values import default_of, part_behind, result_alone, value_at
from whence.tracing.reads.own_functions import covered, replaced
from whence.tracing.target.caches import of_caches

_CONTENT = "cell_contents"
_CORE = (
    *(Tensor, nn.Parameter, nn.Buffer, torch.Size, bool, int, float, complex, str, bytes, type(None)),
    *(torch.device, list, tuple, dict, set, frozenset, slice, range, deque, OrderedDict, defaultdict),
    *(weakref.ref, SimpleNamespace, MappingProxyType, property, staticmethod, classmethod, partial),
)
_NO_OBJECTS = (FunctionType, ModuleType, type, *PLAIN)
MODEL, CLASS, LOSS = "model", "class", "loss"
"""The roots of ways that begin at what was captured, at a class that has a name, and at the loss function."""
Names = tuple[str, ...]


def _print_of(thing: Any) -> str | None:
    function = function_in(thing)
    return None if function is None else fingerprint(function)


@dataclass
class Described:
    """Describes things outside a program for a file; `tensors` are names of state by identity, `functions`
    those of a step, `loss` the loss function, and `model` what was captured, while it lives. `classes` are
    those that guards speak of, with the way to where the model has a module of one.

    What was read from a file is said in its words, which are `said`."""

    tensors: Mapping[int, str]
    classes: Mapping[type, Way] = field(default_factory=dict)
    functions: Iterable[FunctionType] = ()
    model: Any = None
    loss: Any = None
    said: Said = field(default_factory=Said)

    def object(self, reference: Callable[[], Any]) -> Any:
        """A thing that is compared by identity: where it is, and what its code is."""
        if id(reference) in self.said:
            return self.said[id(reference)][1]
        value = reference()
        name = None if value is None else name_of(value)
        return None if name is None else [name, _print_of(value)]

    def function(self, value: Any) -> Any:
        """A function: how it is spelled, and where one is that has no code to compare."""
        if id(value) in self.said:
            return self.said[id(value)][1]
        spelled = str(ExpectedFunction(value))
        return [spelled, None if isinstance(value, FunctionType | InWords) else name_of(value)]

    def code(self, value: Any) -> str | None:
        """What a function runs."""
        if value is None or isinstance(value, CodePrint):
            return None if value is None else value.digest
        return fingerprint_of(*value)

    def tensor(self, value: Any) -> str | None:
        """The name of the state that a tensor is."""
        return self.tensors.get(id(value))

    def root(self, value: Any) -> Any:
        """Where a variable is looked for; None where that cannot be said."""
        if id(value) in self.said:
            return self.said[id(value)][1]
        if value is os.environ:
            return ["environment"]
        if value is sys.modules:
            return ["modules"]
        if isinstance(value, type) and is_found_by_name(value):
            return [CLASS, class_name(value)]
        if isinstance(value, FunctionType) and (name := name_of(value)) is not None:
            return ["function", name]
        module = dict.get(value, "__name__") if isinstance(value, dict) else None
        if isinstance(module, str) and namespace(module) is value:
            return ["module", module]
        return self._routes.get(id(value))

    def way(self, value: Iterable[Any]) -> list[list[str]] | None:
        """How a variable is reached from there; None where that cannot be said."""
        steps = [_step_record(step) for step in value]
        return None if None in steps else steps  # type: ignore[return-value]

    @cached_property
    def _routes(self) -> dict[int, list[str]]:
        """How cells are reached, and functions in them: by the name of a function, and what it closes over.

        Functions are those of the classes and of a step, those whose names their code spells, and those in
        their cells. Objects that these have by a name, and what these hold, are reached from files,
        what no name leads to from classes, which outlive the model, from the model or the loss.
        """
        reached = [*reached_from([(self.model, ())])]
        named_classes = [(kind, (class_name(kind),)) for kind in self.classes if is_found_by_name(kind)]
        inside = [row for row in reached_from(named_classes) if not isinstance(row[0], type)]
        of_classes = {id(thing): [CLASS, *way] for thing, way in inside}
        found: dict[int, list[str]] = {}
        waiting: list[tuple[FunctionType, Names]] = [
            (function, (name,)) for kind in self.classes for name, function in _functions_of(kind)
        ]
        waiting += [(function, (name,)) for function in self.functions if (name := name_of(function))]
        held = [function for function, _ in reached if isinstance(function, FunctionType)]
        waiting += [(each, (name,)) for function in held for name, each in _globals_of(function)]
        seen = set[int]()
        for function, route in waiting:  # which grows
            if id(function) in seen:
                continue
            seen.add(id(function))
            waiting += [(each, (name,)) for name, each in _globals_of(function)]
            if len(route) == 1 and _module_of(function) is None:
                found.setdefault(id(function.__globals__), ["globals", *route])
            for name, cell in _cells_of(function):
                found.setdefault(id(cell), ["closure", *route, name])
                if isinstance(content := content_of_cell(cell), FunctionType):
                    found.setdefault(id(content), ["function", *route, name])
                    waiting.append((content, (*route, name)))
                elif isinstance(content, type):
                    waiting += [(each, (name,)) for name, each in _functions_of(content)]
        functions = {id(each): each for each in (*held, *(function for function, _ in waiting))}
        objects = (row for function in functions.values() for row in _objects_of(function))
        named = {id(thing): ["module", *way] for way, thing in objects}
        of_model = {id(kind): [MODEL, *way] for kind, way in self.classes.items() if way}
        of_model |= {id(thing): [MODEL, *way] for thing, way in reached}
        of_loss = {id(thing): [LOSS, *way] for thing, way in reached_from([(self.loss, ())])}
        return {**of_loss, **named, **of_model, **of_classes, **found}


def _functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a class and its bases, each with a name that leads to it."""
    for base in kind.__mro__:
        name = class_name(base)
        if base.__module__.partition(".")[0] not in ("torch", "builtins") and looked_up(name) is base:
            for key, held in vars(base).items():
                if (function := function_in(held)) is not None:
                    yield f"{name}.{key}", function
                    if (inside := innermost(function)) is not function:
                        yield f"{name}.{key}.{INSIDE}", inside


def _globals_of(function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """The functions that a function's code names, and those of classes, each with a name that leads to it:
    globals, and what it takes out of modules that are globals."""
    code = function.__code__
    if (module := _module_of(function)) is not None:
        found = globals_in(code)
        yield from _functions_in(module, found)
        for held in map(function.__globals__.get, found):
            if type(held) is type(sys):
                yield from _functions_in(held.__name__, names_in(code))


def _module_of(function: FunctionType) -> str | None:
    """The name of the file whose variables it uses; generated code has a table of its own (attrs)."""
    module = function.__globals__.get("__name__")
    is_file = isinstance(module, str) and namespace(module) is function.__globals__
    return module if is_file else None


def _functions_in(module: str, names: Iterable[str]) -> Iterator[tuple[str, FunctionType]]:
    variables = namespace(module) or {}
    for key in names:
        held = variables.get(key)
        if isinstance(held, FunctionType) and str(held.__module__).partition(".")[0] != "torch":
            yield f"{module}:{key}", held
        elif isinstance(held, type):
            yield from _functions_of(held)


def _objects_of(function: FunctionType) -> Iterator[tuple[Names, Any]]:
    """The objects that a function's code names, and what they hold, each with the way there."""
    if (module := _module_of(function)) is not None:
        for key in globals_in(function.__code__):
            held = function.__globals__.get(key)
            kind, way = (
                (held, (module, key)) if isinstance(held, type) else (type(held), (module, key, OWN_CLASS))
            )
            if not is_found_by_name(kind):  # made inside a function
                yield way, kind
            if not issubclass(type(held), _NO_OBJECTS):
                yield (module, key), held
                inside = own_attributes(held) if is_observable(type(held)) else {}
                yield from (((module, key, name), each) for name, each in inside.items())


def _cells_of(function: Any) -> Iterator[tuple[str, CellType]]:
    if isinstance(function, FunctionType):
        yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _step_record(step: Any) -> list[str] | None:
    if step in _FUNCTIONS:
        return [_FUNCTIONS[step], ""]
    match step:
        case itemgetter() if type(index := step.__reduce__()[1][0]) is int:
            return ["index", str(index)]
        case methodcaller() if step.__reduce__()[1] == ("get",):
            return ["context", ""]
        case itemgetter() | attrgetter() | methodcaller():
            given = step.__reduce__()[1]
            if all(isinstance(each, str) for each in given):
                return [type(step).__name__, *given]
            return _key_record(given[0]) if len(given) == 1 else None
        case partial(func=function, args=(), keywords=given) if function in _BY_ONE_WORD:
            return [_BY_ONE_WORD[function], *map(str, given.values())]
        case partial(func=function, keywords=given) if function is _unreachable:
            return [given["kind"], given["name"]]
    return None


def _key_record(key: Any) -> list[str] | None:
    """A key that is no text: one that Python can write, a member of an enumeration, or what has a name."""
    if is_literal(key):
        return ["literal", repr(key)]
    if isinstance(key, Enum):
        kind = class_name(type(key))
        return ["member", f"{kind}.{key.name}"] if _member(f"{kind}.{key.name}") is key else None
    name = name_of(key) if _is_told_by_identity(key) else None
    return None if name is None else ["named", name]


def _member(name: str) -> Any:
    """A member of an enumeration."""
    kind, _, member = name.rpartition(".")
    held = looked_up(kind)
    is_there = isinstance(held, type) and issubclass(held, Enum)
    return held.__members__.get(member, NOTHING) if is_there else NOTHING


def _access_by_member(name: str) -> Callable[[Any], Any]:
    key = _member(name)
    return partial(_unreachable, kind="member", name=name) if key is NOTHING else itemgetter(key)


def _access_by_literal(text: str) -> Callable[[Any], Any]:
    try:
        return itemgetter(literal_eval(text))
    except SyntaxError as error:
        raise ValueError(text) from error


def _alone(step: Callable[[Any], Any], _word: str) -> Callable[[Any], Any]:
    return step


def _is_told_by_identity(key: Any) -> bool:
    """Whether looking for a key runs no code of its own: a class, or a name of typing's."""
    its: Any = type(key).__hash__
    return its in (object.__hash__, type.__hash__)


def _access_by_name(name: str) -> Callable[[Any], Any]:
    key = looked_up(name)
    is_there = key is not NOTHING and _is_told_by_identity(key)
    return itemgetter(key) if is_there else partial(_unreachable, kind="named", name=name)


def _unreachable(_held: Any, kind: str = "", name: str = "") -> Any:
    raise LookupError(kind, name)


@dataclass
class LoadedNames:
    """Finds things by what a file says of them.

    `classes` are those of a live model, by name, None where there is none: then everything stays in words.
    `lost` lists what no check can compare, because the file could not say where it is. `said` are its words
    about what was found, and about what stands for the rest.
    """

    classes: Mapping[str, type] | None = None
    model: Any = None
    loss: Any = None
    lost: list[str] = field(default_factory=list)
    said: Said = field(default_factory=Said)
    _made: dict[tuple[str, int], type] = field(default_factory=dict)
    _unmade: dict[tuple[str, str], type[Unmade]] = field(default_factory=dict)

    @classmethod
    def beside(cls, modules: Iterable[nn.Module], model: Any, loss: Any = None) -> "LoadedNames":
        """What is found beside a live model, and the loss function that it is trained with."""
        found: dict[str, set[type]] = {}
        for kind in {kind for module in modules for kind in type(module).__mro__}:
            found.setdefault(class_name(kind), set()).add(kind)
        return cls({name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}, model, loss)

    def class_(self, name: str, nth: int = 0, way: Way = ()) -> type:
        """The class of that name; one of ours that is called so where it stays a name. Caches, their layers
        and registered containers are made again, with or without a model.

        Of several classes of one name, made for one instance each, it is the `nth`. One that was made inside
        a function is at the end of a `way` from the model.
        """
        held = looked_up(name)
        found = _KNOWN.get(name) or of_caches(held) or (held if is_container(held) and not nth else None)
        if found is None and self.classes is not None and way:
            held = at_the_end(self.model, way)
            found = held if isinstance(held, type) and class_name(held) == name else None
        if found is None and self.classes is not None and not nth:
            held, file = self.classes.get(name) or looked_up(name), name.partition(":")[0]
            found = held if isinstance(held, type) else class_of_a_variable(namespace(file) or {}, name)
        if found is None and (name, nth) not in self._made:
            module, _, path = name.partition(":")
            named = {"__module__": module, "__qualname__": path}
            bases = (NamedOnly,) if self.classes is None else ()
            self._made[name, nth] = type(path.rpartition(".")[2], bases, named)
        return found or self._made[name, nth]

    def is_stand_in(self, kind: type) -> bool:
        """Whether a class is one of ours that is called so."""
        return kind in self._made.values()

    def unmade(self, name: str, why: str, remedy: str) -> type[Unmade]:
        """What stands for a container that nobody can make here."""
        key = name, why
        if key not in self._unmade:
            self._unmade[key] = Unmade.named(name, why, remedy)
            self.lost.append(f"the container {name.replace(':', '.')}")
        return self._unmade[key]

    def object(self, said: tuple[str | None, ...] | None, text: str) -> Callable[[], Any]:
        """What is compared by identity, where it is still what it was."""
        name, digest = said or (None, None)
        held = looked_up(name) if name and self.classes is not None else NOTHING
        if held is NOTHING or _print_of(held) != digest:
            self.lost.append(text)
            held = None
        return self.said.note(partial(itself, held), said)  # type: ignore[no-any-return]

    def resolved(self, kind: type, values: dict[str, Any]) -> dict[str, Any]:
        """The fields of a record with what it speaks of in the place of its name."""
        said = values["target"]
        if kind is Reference:
            return {**values, "target": self.object(said, values["text"])}
        if kind is not ExpectedFunction:
            return values
        spelled, name = said
        held = looked_up(name) if name and self.classes is not None else NOTHING
        if held is NOTHING and values["code"] is None:
            self.lost.append(spelled)
        return {**values, "target": self.said.note(InWords(spelled), said) if held is NOTHING else held}

    def root(self, said: list[str] | None) -> Any:
        """Where a variable is looked for; what is `Unfound` where that is not known."""
        found = NOTHING if said is None or self.classes is None else self._root(said)
        return self.said.note(Unfound() if found is NOTHING else found, said)

    def _root(self, said: list[str]) -> Any:
        kind, *names = said
        match kind:
            case "environment":
                return os.environ
            case "modules":
                return sys.modules
            case "module":
                return at_the_end(namespace(names[0]) or NOTHING, tuple(names[1:]))
            case "class":
                return at_the_end(looked_up(names[0]), tuple(names[1:]))
            case "function":
                held = _closed_over(*names) if names[1:] else looked_up(names[0])
                return function_in(held) or NOTHING
            case "globals":
                function = function_in(looked_up(names[0]))
                return NOTHING if function is None else function.__globals__
            case "model":
                return at_the_end(self.model, tuple(names))
            case "loss":
                return NOTHING if self.loss is None else at_the_end(self.loss, tuple(names))
        return _cell_at(*names)

    def way(self, said: list[list[str]] | None) -> tuple[Callable[[Any], Any], ...]:
        """How it is reached from there; nothing is found where the file could not say."""
        if said is None:
            return (_unreachable,)
        return tuple(_STEPS[kind](name) for kind, *rest in said for name in rest[-1:])


def _closed_over(*names: str) -> Any:
    cell = _cell_at(*names)
    return NOTHING if cell is NOTHING else content_of_cell(cell)


def _cell_at(name: str, *variables: str) -> Any:
    found: Any = function_in(looked_up(name))
    for variable in variables[:-1]:
        cell = dict(_cells_of(found)).get(variable)
        found = None if cell is None else content_of_cell(cell)
    return dict(_cells_of(found)).get(variables[-1], NOTHING)


_FUNCTIONS: Mapping[Any, str] = MappingProxyType(
    {tuple: "keys", len: "length", type: "class", result_alone: "result"}
)
"""Steps that are a function alone, and what they are called in a file."""
_BY_ONE_WORD = MappingProxyType(
    {
        **{static_attribute: "held", part_behind: "behind", default_of: "default", value_at: "value"},
        **{replaced: "replaced", covered: "covered"},
    }
)
"""Steps that are one function with one keyword, and what they are called in a file."""
_STEPS: Mapping[str, Callable[[str], Callable[[Any], Any]]] = MappingProxyType(
    {
        "itemgetter": itemgetter,
        "named": _access_by_name,
        "literal": _access_by_literal,
        "member": _access_by_member,
        "index": lambda position: itemgetter(int(position)),
        "attrgetter": lambda _: attrgetter(_CONTENT),
        "methodcaller": lambda name: methodcaller("get", name),
        "context": lambda _: methodcaller("get"),
        "behind": lambda position: partial(part_behind, position=int(position)),
        **{word: partial(_alone, function) for function, word in _FUNCTIONS.items()},
        "default": lambda position: partial(default_of, default=int(position)),
        "value": lambda position: partial(value_at, position=int(position)),
        "held": lambda name: partial(static_attribute, name=name),
        "replaced": lambda names: partial(replaced, names=names),
        "covered": lambda names: partial(covered, names=names),
    }
)
_KNOWN: Mapping[str, type] = MappingProxyType({class_name(kind): kind for kind in _CORE})

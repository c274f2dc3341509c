"""A Python value becomes what a guard expects: by value where that is possible, by identity where not."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from whence._torch.observe.attribute_reads import class_attribute
from whence._torch.observe.hooks import HOOK_FLAGS, HOOK_KINDS
from whence._torch.subclasses.fully_sharded import class_as_written, is_of_sharding
from whence._torch.subclasses.spread import spread_layout
from whence._torch.subclasses.wrapper_subclasses import is_composed, layout_of
from whence.dependence.snapshots import content_of_cell
from whence.dependence.tensor_facts import facts_of
from whence.dependence.values import content_of, is_constant, is_solid
from whence.program.guards.expectations import (
    Entries,
    Expectation,
    ExpectedConstant,
    ExpectedFunction,
    ExpectedHolder,
    ExpectedTensor,
    ExpectedThing,
    ExpectedWords,
    Hooks,
    Items,
    Reference,
    Snapshot,
)
from whence.program.names import InWords

METHODS_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
"""Methods of classes that are written in C, which a class alone is asked for."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType, *METHODS_OF_C)
_BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
CALLED = (*_FUNCTIONS, types.MethodType, functools.partial)
"""What functions are found behind."""


HELD_BY_CLASSES = (property, classmethod, staticmethod, functools.partialmethod)
"""What a class holds around what it calls."""


class Describer:
    """Describes the values of one capture: holders and tensors keep their numbers.

    `lasting` gives, by identity, what is described in the place of a tensor: the shard where FSDP manages it,
    a fake on another device where it lay there for the run.
    `registered` are the tensors that a model is asked for by name: another one of the kind will do in their
    place. Of any other tensor the program has the very object. `named` are attributes that the code spells.
    Strides are exact `with_strides`; otherwise those of a copy will do. At `places` a step puts something.
    """

    def __init__(
        self,
        holders: Mapping[int, int],
        lasting: Mapping[int, Tensor] | None = None,
        registered: Container[int] = (),
        named: frozenset[str] = frozenset(),
        with_strides: Container[int] = (),
        places: Set[tuple[int, Any]] = frozenset(),
    ) -> None:
        self._holders = holders
        self._lasting = lasting or {}
        self._registered = registered
        self._named = named
        self._with_strides = with_strides
        self._places = places
        self._tensors: dict[int, int] = {}
        self._kept: list[object] = []
        self._known: dict[int, Expectation] = {}
        self._things: dict[int, int] = {}

    def describe(self, value: Any) -> Expectation:
        """What a guard expects in the place of `value`."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if is_constant(value):
            return ExpectedConstant(value)
        number = self._holders.get(id(value))
        if number is not None:
            return ExpectedHolder(number, class_as_written(type(value)))
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = reference(value)  # for what leads back to itself
            self._known[id(value)] = self._inside(value)
        return self._known[id(value)]

    def thing(self, value: object) -> ExpectedThing | ExpectedHolder:
        """What a guard expects in the place of an object that others look into."""
        kind = class_as_written(type(value))
        number = self._holders.get(id(value))
        return ExpectedThing(self._number_of(value), kind) if number is None else ExpectedHolder(number, kind)

    def _number_of(self, value: object) -> int:
        self._kept.append(value)
        return self._things.setdefault(id(value), len(self._things))

    def tensor(self, tensor: Tensor) -> ExpectedTensor:
        """The facts about a tensor, with its number."""
        is_registered, is_managed = id(tensor) in self._registered, id(tensor) in self._lasting
        tensor = self._lasting.get(id(tensor), tensor)
        self._kept.append(tensor)
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        target = None if is_registered else functools.partial(itself, tensor)
        found = expected_tensor(tensor, number, target)
        exact = id(tensor) in self._with_strides
        if not exact and (copied := _strides_of_copy(tensor)) is not None:
            found = replace(found, copied=copied)
        if own := self._attributes(tensor):
            found = replace(found, attributes=own)
        return found.as_one() if is_managed else found

    def numbers_of(self, tensors: Container[int]) -> frozenset[int]:
        """The numbers of those of these tensors, by identity, that it has described."""
        return frozenset(number for key, number in self._tensors.items() if key in tensors)

    def _attributes(self, thing: Tensor | types.FunctionType) -> tuple[tuple[str, Expectation], ...]:
        """What somebody has put on a tensor or a function, of what code spells."""
        held = vars(thing)
        own = self._named.intersection(held) if held else ()
        return tuple((name, self._attribute(held, name)) for name in sorted(own))

    def _attribute(self, held: dict[str, Any], name: str) -> Expectation:
        return self._item(held, name, held[name])

    def _item(self, held: Any, key: object, value: Any) -> Expectation:
        """What is in one place of a container."""
        is_put = self._is_put(held, key, value)
        return ExpectedWords("what a step puts there") if is_put else self.describe(value)

    def _is_put(self, held: Any, key: object, value: Any) -> bool:
        """Whether a step puts something there, or appends to what is there."""
        return bool(self._places) and ((id(held), key) in self._places or (id(value), None) in self._places)

    def _inside(self, value: Any) -> Expectation:
        if (held := entries_of(value)) is not None:
            return self._entries(value, held)
        if isinstance(value, list | tuple | deque):
            number = -1 if isinstance(value, tuple) else self._number_of(value)
            items = (self._item(value, position, item) for position, item in enumerate(value))
            return Items(type(value), tuple(items), number)
        if isinstance(value, HELD_BY_CLASSES):
            return Items(type(value), (self.describe(inside_of_class(value)),))
        if isinstance(value, weakref.ref):
            return Items(weakref.ref, ())  # what it leads to is somebody else's, and looked at there
        if isinstance(value, set | frozenset) and all(map(is_solid, value)):
            if isinstance(value, frozenset):
                return ExpectedConstant(frozenset(value))
            return ExpectedConstant(set(value), self._number_of(value))
        content = content_of(value)
        if content is None:
            return self._function(value)
        return Snapshot(type(value), content, self._number_of(value))

    def _keys_put(self, held: dict[Any, Any]) -> Iterator[Any]:
        """Keys under which a step puts something, or appends to what is there."""
        if self._places:
            yield from (key for key, item in held.items() if self._is_put(held, key, item))
            yield from (key for holder, key in self._places if holder == id(held) and key not in held)

    def _entries(self, value: Any, held: dict[Any, Any]) -> Entries:
        """A mapping, without what a step puts under keys of it."""
        number = self._number_of(value)
        put = tuple(self._keys_put(held))
        held = {key: item for key, item in held.items() if key not in put} if put else held
        keys = [(key, is_constant(key) or is_solid(key)) for key in held]
        return Entries(
            type(value),
            tuple(key if is_plain else InWords(type(key).__name__) for key, is_plain in keys),
            tuple(map(self.describe, held.values())),
            number,
            tuple(reference(key) for key, is_plain in keys if not is_plain),
            put,
        )

    def _function(self, value: Any) -> Expectation:
        function = function_of(value)
        if function is None:
            return reference(value)
        target, owner, fixed = function
        described = ExpectedFunction(
            target=target,
            owner=None if owner is None else type(owner),
            bound=self._holders.get(id(owner)) if owner is not None else None,
            closure=tuple(map(self.describe, closure_of(target))),
            code=code_of(target),
            attributes=self._attributes(target) if isinstance(target, types.FunctionType) else (),
        )
        if fixed is None:
            return described
        keywords = tuple((key, self.describe(item)) for key, item in fixed.keywords.items())
        return replace(described, arguments=tuple(map(self.describe, fixed.args)), keywords=keywords)


def _strides_of_copy(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a copy of a tensor with gaps between its elements, which has none."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_lazy(tensor) or tensor.is_contiguous():
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta").clone().stride()


def shown(value: object) -> str:
    """A value in words, by no code of its own."""
    return str(Describer({}).describe(value))


def entries_of(value: Any) -> dict[Any, Any] | None:
    """What a dictionary, a namespace or a view of a mapping holds; None for anything else."""
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    if isinstance(value, types.MappingProxyType):
        return dict(value.items())
    return value if isinstance(value, dict) else None


def itself(value: Any) -> Any:
    """What it is given."""
    return value


def inside_of_class(held: Any) -> Any:
    """What is called of what a class holds, with the arguments that it fixes."""
    if isinstance(held, functools.partialmethod):
        return functools.partial(held.func, *held.args, **held.keywords)
    return held.fget if isinstance(held, property) else held.__func__


def code_of(function: Any) -> object:
    """What a function runs and with which defaults, to be told from what it runs later."""
    if not isinstance(function, types.FunctionType):
        return None
    return function.__code__, function.__defaults__, tuple((function.__kwdefaults__ or {}).items())


def function_of(value: Any) -> tuple[Any, object, functools.partial[Any] | None] | None:
    """The function behind a callable: itself, the object it is bound to, and a partial's own arguments."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__, None
    if isinstance(value, functools.partial):
        inner = function_of(value.func)
        if inner is None:
            return value.func, None, value
        target, owner, fixed = inner
        given = (*(() if fixed is None else fixed.args), *value.args)
        return target, owner, functools.partial(target, *given, **value.keywords)
    if isinstance(value, _FUNCTIONS):
        bound = _bound_in_c(value)
        return (value, None, None) if bound is None else (bound.func, None, bound)
    return None


def _bound_in_c(value: Any) -> functools.partial[Any] | None:
    """A method in C of an object (`"abc".upper`), as that of the class with the object as an argument."""
    kind = type(value.__self__) if isinstance(value, _BOUND_IN_C) else type
    if issubclass(kind, (types.ModuleType, type, types.NoneType)):
        return None
    method = class_attribute(kind, value.__name__)
    return functools.partial(method, value.__self__) if isinstance(method, METHODS_OF_C) else None


def closure_of(function: Any) -> list[Any]:
    """Defaults and outer variables of a function made inside another, and what generated code names; nothing
    for one that stands alone.
    """
    if not isinstance(function, types.FunctionType):
        return []
    if "__name__" not in function.__globals__:  # no file's: whoever generated the code gave it these
        return [held for name in function.__code__.co_names if (held := function.__globals__.get(name))]
    if "<locals>" not in function.__qualname__:
        return []
    cells = [content_of_cell(cell) for cell in function.__closure__ or () if cell != types.CellType()]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def expected_tensor(
    tensor: Tensor, number: int = -1, target: Callable[[], object] | None = None
) -> ExpectedTensor:
    """Everything about a tensor but its numbers; how a DTensor is spread, as data."""
    if not is_composed(tensor):
        return ExpectedTensor(facts_of(tensor), number, target)
    layout = layout_of(tensor)
    parts = tuple(expected_tensor(getattr(tensor, name)) for name in layout.names)
    return ExpectedTensor(facts_of(tensor), number, target, spread_layout(layout) or layout, parts)


def reference(value: object) -> Reference:
    """Identity, without keeping the object alive where it can be helped."""
    kind = type(value)
    return Reference(_weakly(value), kind, f"a {kind.__name__}")


def _weakly(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # objects without a place for weak references are kept
        return lambda: value


def hook_rows(module: nn.Module, wrappers: Sequence[nn.Module] = ()) -> list[tuple[str, Any]]:
    """Every hook of a module and of what wraps it, each with its kind in words.

    Those of FSDP are not among them: they only gather what a program has.
    """
    return [row for held in (*wrappers, module) for row in _own_hooks(held)]


def _own_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    held = module.__dict__
    if not any(map(held.get, HOOK_KINDS)):
        return []
    rows = (
        (table, key, hook) for table in HOOK_KINDS if held.get(table) for key, hook in held[table].items()
    )
    return [(_kind_of_hook(held, table, key), hook) for table, key, hook in rows if not is_of_sharding(hook)]


def _kind_of_hook(held: dict[str, Any], table: str, key: int) -> str:
    flags = [word for flag, word in HOOK_FLAGS.get(table, {}).items() if held.get(flag, {}).get(key)]
    return " ".join([HOOK_KINDS[table], *(f"({word})" for word in flags)])


_NO_HOOKS = Hooks(())


def described_hooks(rows: Sequence[tuple[str, Any]], describer: Describer) -> Hooks:
    """Hooks by kind and function."""
    if not rows:
        return _NO_HOOKS
    return Hooks(tuple((kind, describer.describe(hook)) for kind, hook in rows))

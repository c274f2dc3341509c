"""Find attributes without running the code of the classes that hold them."""

import threading
from types import FunctionType, MemberDescriptorType
from typing import Any

from torch import nn

from whence._torch.observe.attribute_reads import NOTHING, TABLES, class_attribute, own_attributes
from whence._torch.plain_values import same_constant
from whence._torch.subclasses.fully_sharded import class_as_written
from whence.dependence.describe import closure_of, code_of
from whence.dependence.values import is_constant

__all__ = ["NOTHING", "class_attribute", "is_of_module", "module_attribute", "same_class", "static_attribute"]


def is_of_module(name: str) -> bool:
    """Whether a name belongs to Module's own machinery."""
    return name in nn.Module.__dict__


def module_attribute(module: nn.Module, name: str) -> Any:
    """What a module itself holds under a name: attribute, parameter, buffer or submodule; else `NOTHING`."""
    held = module.__dict__
    for table in (held, *(held[table] for table in TABLES)):
        if name in table:
            return table[name]
    return NOTHING


def static_attribute(thing: Any, name: str) -> Any:
    """An attribute of an object or a class, found without running any code of theirs."""
    if isinstance(thing, type):
        return class_attribute(thing, name)
    own = thing.__dict__ if issubclass(type(thing), threading.local) else own_attributes(thing)
    held = own.get(name, NOTHING)
    if held is NOTHING:
        held = class_attribute(type(thing), name)
    if type(held) is not MemberDescriptorType:
        return held
    try:
        return held.__get__(thing)
    except AttributeError:  # a slot into which nothing was put yet
        return NOTHING


def same_class(expected: type, found: type) -> bool:
    """Whether two classes are one, also where `fully_shard` has put its own before it.

    Some classes are made for one instance (`fx.GraphModule`, `torch.nn.utils.parametrize`, a class in a
    function): two of them are one when the same code made them around equal values.
    """
    expected, found = class_as_written(expected), class_as_written(found)
    return expected is found or (
        _is_made(expected) and expected.__qualname__ == found.__qualname__ and _are_alike(expected, found)
    )


def _is_made(kind: type) -> bool:
    return "<locals>" in kind.__qualname__ or kind.__module__ == "torch.nn.utils.parametrize"


def _are_alike(left: type, right: type) -> bool:
    """Whether two classes have the same attributes; copying an instance leaves a note in its class."""
    ours, theirs = (
        {name: value for name, value in vars(kind).items() if _is_own(name, value)} for kind in (left, right)
    )
    return (
        left.__module__ == right.__module__
        and len(left.__bases__) == len(right.__bases__)
        and all(map(same_class, left.__bases__, right.__bases__))
        and ours.keys() == theirs.keys()
        and all(_is_alike(value, theirs[name], (left, right)) for name, value in ours.items())
    )


def _is_own(name: str, value: object) -> bool:
    return isinstance(value, FunctionType) or not (name.startswith("__") and name.endswith("__"))


def _is_alike(left: Any, right: Any, kinds: tuple[type, type]) -> bool:
    """Whether two attributes of classes are: the class itself and its instance are those of each, and so is
    what PyTorch keeps there by itself.
    """
    if left is right or kinds in ((left, right), (type(left), type(right))):
        return True
    if is_constant(left):
        return same_constant(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, property):
        parts = ((getattr(left, part), getattr(right, part)) for part in ("fget", "fset", "fdel"))
        return all(_is_alike(mine, other, kinds) for mine, other in parts)
    if isinstance(left, staticmethod | classmethod):
        return _is_alike(left.__func__, right.__func__, kinds)
    if not isinstance(left, FunctionType):
        return type(left).__module__.startswith("torch.")
    around = closure_of(left), closure_of(right)
    return (
        code_of(left) == code_of(right)
        and len(around[0]) == len(around[1])
        and all(_is_alike(mine, other, kinds) for mine, other in zip(*around, strict=True))
    )

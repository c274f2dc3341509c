"""Find attributes without running the code of the classes that hold them."""

from typing import Any

from torch import nn

from whence._torch.sharding import class_as_written

NOTHING = object()
"""What a lookup gives that finds nothing; None is a value."""


def class_attribute(kind: type, name: str) -> Any:
    """The attribute as a class or one of its bases spells it, unbound; `NOTHING` where none does."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return NOTHING


def is_of_module(name: str) -> bool:
    """Whether a name belongs to Module's own machinery."""
    return name in nn.Module.__dict__


def module_attribute(module: nn.Module, name: str) -> Any:
    """What a module itself holds under a name: attribute, parameter, buffer or submodule; else `NOTHING`."""
    held = module.__dict__
    for table in (held, held["_parameters"], held["_buffers"], held["_modules"]):
        if name in table:
            return table[name]
    return NOTHING


def same_class(expected: type, found: type) -> bool:
    """Whether two classes are one, also where `fully_shard` has put its own before it.

    `torch.nn.utils.parametrize` makes a class for every module it touches; two of them are one when they
    were made alike from one class.
    """
    expected, found = class_as_written(expected), class_as_written(found)
    if expected is found:
        return True
    return (
        _is_made(expected)
        and _is_made(found)
        and expected.__bases__ == found.__bases__
        and _names(expected) == _names(found)
    )


def _is_made(kind: type) -> bool:
    return kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__.startswith("Parametrized")


def _names(kind: type) -> set[str]:
    """What a class has; copying an instance leaves a note in it."""
    return set(kind.__dict__) - {"__slotnames__"}

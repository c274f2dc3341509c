"""Find attributes without running the code of the classes that hold them."""

from typing import Any

from torch import nn

from whence._torch.attribute_reads import NOTHING, TABLES, class_attribute
from whence._torch.sharding import class_as_written

__all__ = ["NOTHING", "class_attribute", "is_of_module", "module_attribute", "same_class"]


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

"""What a module holds in the place of what one guard expects."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from whence._torch.subclasses.fully_sharded import class_as_written
from whence.dependence.describe import Describer
from whence.dependence.hooks import described_hooks, hook_rows
from whence.dependence.lookup import NOTHING, class_attribute, module_attribute
from whence.dependence.matching import Walk, difference, found_in_place
from whence.program.guards.expectations import ExpectedNames, Hooks, Missing
from whence.program.guards.rows import Guard
from whence.schema import GuardKind


def found_in_module(guard: Guard, module: nn.Module, walk: Walk) -> str | None:
    """What is there in the place of what a guard expects, or None when that is it."""
    walk.at = guard.what
    if guard.kind is GuardKind.HOOKS:
        return _found_hooks(guard, hook_rows(module, walk.wrappers.get(id(module), ())), walk)
    if guard.kind is GuardKind.STRUCTURE:
        found = ExpectedNames(tuple(module.__dict__[guard.name]))
        return None if guard.expected == found else str(found)
    value = module_attribute(module, guard.name)
    if isinstance(guard.expected, Missing) and value is NOTHING:
        value = class_attribute(class_as_written(type(module)), guard.name)
    return found_in_place(guard.expected, value, walk)


def _found_hooks(guard: Guard, rows: Sequence[tuple[str, Any]], walk: Walk) -> str | None:
    expected = guard.expected.rows if isinstance(guard.expected, Hooks) else ()
    same = len(rows) == len(expected) and all(
        kind == wanted and difference(function, hook, walk) is None
        for (kind, hook), (wanted, function) in zip(rows, expected, strict=True)
    )
    return None if same else str(described_hooks(rows, Describer({})))

"""What decides of a module that code names and the captured model does not hold: all that it is made of."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

from torch import nn

from whence._torch.files import is_library
from whence._torch.observe.attribute_reads import TABLES, own_attributes
from whence._torch.observe.hooks import HOOK_KINDS
from whence._torch.observe.wrappers import seen_through
from whence._torch.plain_values import PLAIN
from whence.dependence.lookup import static_attribute
from whence.dependence.values import is_solid
from whence.program.arguments.optimizer_arguments import Outside

OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has, which is looked at elsewhere."""


def facts_of(found: Outside) -> Iterator[Outside]:
    """Its class, mode and forward, its tensors, how many hooks it has, and numbers that a library's keeps;
    nothing of one that only wraps another."""
    module: nn.Module = found.value
    if seen_through(module) is not module:
        return
    held = own_attributes(module)
    yield Outside(f"the class of {found.path}", found.root, (*found.way, type), type(module))
    for name in ("training", "forward"):
        yield _attribute_of_module(found, name)
    for table in TABLES:
        yield _on(found, f"the names in {found.path}.{table}", table, tuple, tuple(held[table]))
    for table in TABLES[:2]:
        for name, value in held[table].items():
            yield _on(found, f"{found.path}.{name}", table, itemgetter(name), value)
    for table, words in HOOK_KINDS.items():
        yield _on(found, f"how many {words}s {found.path} has", table, len, len(held[table]))
    for name, value in held.items() if is_library(type(module).__module__) else ():
        if name not in OF_MODULES and (type(value) in PLAIN or is_solid(value)):
            yield _attribute_of_module(found, name)


def children_of(found: Outside) -> Iterator[Outside]:
    """The modules inside it."""
    for name, child in own_attributes(found.value)["_modules"].items():
        if child is not None:
            yield _on(found, f"{found.path}.{name}", "_modules", itemgetter(name), child)


def _attribute_of_module(found: Outside, name: str) -> Outside:
    step: Callable[[Any], Any] = partial(static_attribute, name=name)
    return Outside(f"{found.path}.{name}", found.root, (*found.way, step), step(found.value))


def _on(found: Outside, path: str, table: str, step: Callable[[Any], Any], value: object) -> Outside:
    """Something of one of its tables."""
    to_table: Callable[[Any], Any] = partial(static_attribute, name=table)
    return Outside(path, found.root, (*found.way, to_table, step), value)

"""The hooks of a module as a guard expects them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from whence._torch.sharding import is_of_sharding
from whence.guards.describe import Describer
from whence.program.expectations import Hooks

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
TABLES = tuple(_KINDS)
"""Where a module keeps its hooks."""
_FLAGS = {
    "_forward_pre_hooks": {"_forward_pre_hooks_with_kwargs": "with kwargs"},
    "_forward_hooks": {"_forward_hooks_with_kwargs": "with kwargs", "_forward_hooks_always_called": "always"},
}


def hook_rows(module: nn.Module, wrappers: Sequence[nn.Module] = ()) -> list[tuple[str, Any]]:
    """Every hook of a module and of what wraps it, each with its kind in words.

    Those of FSDP are not among them: they only gather what a program has.
    """
    return [row for held in (*wrappers, module) for row in _rows(held)]


def _rows(module: nn.Module) -> list[tuple[str, Any]]:
    held = module.__dict__
    rows = ((table, key, hook) for table in _KINDS for key, hook in held.get(table, {}).items())
    return [(_kind(held, table, key), hook) for table, key, hook in rows if not is_of_sharding(hook)]


def _kind(held: dict[str, Any], table: str, key: int) -> str:
    flags = [word for flag, word in _FLAGS.get(table, {}).items() if held.get(flag, {}).get(key)]
    return " ".join([_KINDS[table], *(f"({word})" for word in flags)])


def described_hooks(module: nn.Module, wrappers: Sequence[nn.Module], describer: Describer) -> Hooks:
    """The hooks of a module and of what wraps it, by kind and function."""
    return Hooks(tuple((kind, describer.describe(hook)) for kind, hook in hook_rows(module, wrappers)))

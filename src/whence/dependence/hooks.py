"""The hooks of a module as a guard expects them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from whence._torch.observe.hooks import HOOK_FLAGS, HOOK_KINDS
from whence._torch.subclasses.fully_sharded import is_of_sharding
from whence.dependence.describe import Describer
from whence.program.guards.expectations import Hooks


def hook_rows(module: nn.Module, wrappers: Sequence[nn.Module] = ()) -> list[tuple[str, Any]]:
    """Every hook of a module and of what wraps it, each with its kind in words.

    Those of FSDP are not among them: they only gather what a program has.
    """
    return [row for held in (*wrappers, module) for row in _rows(held)]


def _rows(module: nn.Module) -> list[tuple[str, Any]]:
    held = module.__dict__
    if not any(map(held.get, HOOK_KINDS)):
        return []
    rows = (
        (table, key, hook) for table in HOOK_KINDS if held.get(table) for key, hook in held[table].items()
    )
    return [(_kind(held, table, key), hook) for table, key, hook in rows if not is_of_sharding(hook)]


def _kind(held: dict[str, Any], table: str, key: int) -> str:
    flags = [word for flag, word in HOOK_FLAGS.get(table, {}).items() if held.get(flag, {}).get(key)]
    return " ".join([HOOK_KINDS[table], *(f"({word})" for word in flags)])


_NO_HOOKS = Hooks(())


def described_hooks(rows: Sequence[tuple[str, Any]], describer: Describer) -> Hooks:
    """Hooks by kind and function."""
    if not rows:
        return _NO_HOOKS
    return Hooks(tuple((kind, describer.describe(hook)) for kind, hook in rows))

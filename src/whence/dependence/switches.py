"""Switches of the process that decide what torch does: as they were at capture."""

from collections.abc import Iterator

from whence._torch.autograd.switches import READ
from whence._torch.observe.hooks import global_hooks
from whence.dependence.describe import Describer
from whence.dependence.hooks import described_hooks
from whence.program import Program
from whence.program.guards.expectations import ExpectedConstant, Hooks
from whence.program.guards.rows import Guard
from whence.schema import GuardKind, Strictness

GLOBAL_HOOKS = "hooks of all modules"
_OF_AUTOGRAD = ("grad mode", "inference mode")


def mode_guards(program: Program) -> Iterator[Guard]:
    """One guard for each switch; a program with its own backward does not depend on those of autograd."""
    for name, (read, reason) in READ.items():
        if not (program.has_backward and name in _OF_AUTOGRAD):
            yield Guard(GuardKind.MODE, name, ExpectedConstant(read()), Strictness.EQUAL, reason, name)
    why = "they run in every module call, and what they did is part of the program"
    hooks = described_global_hooks(Describer({}))
    yield Guard(GuardKind.HOOKS, GLOBAL_HOOKS, hooks, Strictness.IDENTITY, why, GLOBAL_HOOKS)


def described_global_hooks(describer: Describer) -> Hooks:
    """The hooks that fire for every module now."""
    rows = ((kind.removesuffix("s"), hook) for kind, hooks in global_hooks().items() for hook in hooks)
    return described_hooks(list(rows), describer)

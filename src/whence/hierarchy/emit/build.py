"""A program becomes modules: plan, check, emit."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from torch import nn

from whence._torch.observe.hooks import global_hooks
from whence.errors import UsageError
from whence.hierarchy.emit.calls import CallBody, Compiler
from whence.hierarchy.emit.modules import emit
from whence.hierarchy.plan.check import check
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.plan.planning import plan
from whence.hierarchy.run.captured import captured_of
from whence.hierarchy.run.variants import keep_variant
from whence.hierarchy.tree import Tree
from whence.program import FlatProgram, wellformed
from whence.program.guards.expectations import Hooks
from whence.program.guards.guards import GLOBAL_HOOKS
from whence.program.state import copy_results, refuse_elsewhere
from whence.provenance import CallSite
from whence.schema import Phase


@dataclass(frozen=True)
class DissolvedCall:
    """A call whose operations stay in its caller's graph in a phase, and why."""

    call: CallSite
    phase: Phase
    reason: str

    def __str__(self) -> str:
        return f"{self.call or '(root)'}, {self.phase}: {self.reason}"


def unflatten(program: FlatProgram, *, onto: object = None, copy: bool = False) -> Tree:
    """The module tree of a program, runnable and trainable; `onto` a model, as instances of its classes."""
    _look_around(program)
    return _with_variants(program, partial(_emitted, onto=onto), copy=copy)  # type: ignore[return-value]


def flat_module(program: FlatProgram, *, copy: bool = False) -> Tree:
    """The program as one module with one graph, holding the original's state under its own names."""
    _look_around(program)
    return _with_variants(program, _module_with_one_graph, copy=copy)  # type: ignore[return-value]


def flat_inside(program: FlatProgram) -> nn.Module:
    """The same, for calls of its `forward`: those run no hooks."""
    return _with_variants(program, _module_with_one_graph, copy=False)


def _module_with_one_graph(program: FlatProgram) -> nn.Module:
    module, flat = _emitted(program), plan(program, flat=True)
    check(flat)
    held = captured_of(module)
    held.watched, held.calls = held.calls[0], (CallBody(flat, ROOT_CALL, Compiler(flat, flat=True)),)
    return module


def _with_variants(
    program: FlatProgram, made: Callable[[FlatProgram], nn.Module], *, copy: bool
) -> nn.Module:
    """The module that is made of a program, behind which are those of its variants."""
    module = made(program)
    for each in program.variants:
        keep_variant(module, made(each), program)
    if not copy:
        return module
    held = [tensor for each in (program, *program.variants) for tensor in each.state.values()]
    return deepcopy(module, copy_results(held, {}))


def flat_calls(program: FlatProgram) -> tuple[DissolvedCall, ...]:
    """The calls that have no graph of their own in the tree, and why."""
    refuse_step(program)
    planned = plan(program)
    rows = (DissolvedCall(planned.site(row.number), row.phase, row.reason) for row in planned.flattened)
    return tuple(dict.fromkeys(rows))


def _emitted(program: FlatProgram, *, onto: object = None) -> nn.Module:
    refuse_step(program)
    refuse_elsewhere(program)
    wellformed.check(program)
    planned = plan(program)
    check(planned)
    _warn_about_dissolved(planned)
    return emit(planned, onto=onto)


def _look_around(program: FlatProgram) -> None:
    """Say what of Python a module of the program leaves alone, before somebody calls one."""
    _refuse_hooks_of_all(program)
    settled = program.guards.settled
    if settled is not None and settled.changes:
        warnings.warn(
            f"each run of the model changes {', '.join(settled.changes)}, which runs of a module of the "
            "program leave as it is: nothing that it computes depends on that",
            stacklevel=4,
        )


def _refuse_hooks_of_all(program: FlatProgram) -> None:
    """Hooks for all modules that ran in a capture would run again in the call of the module it becomes."""
    ran = (guard.expected for guard in program.guards if guard.name == GLOBAL_HOOKS)
    if any(hooks != Hooks() for hooks in ran) and any(global_hooks().values()):
        raise UsageError(
            f"{program.name} was captured with hooks on all modules, and they are there",
            why="they are part of the program, and run once more where a module is called",
            remedy="remove them, put hooks on the modules that they are for, or call program.bind(model)",
        )


def refuse_step(program: FlatProgram) -> None:
    """A module computes a forward, and a backward when it is asked for one; a step is more than that."""
    if program.step is not None:
        raise UsageError(
            f"the program of the training step {program.name} has no modules to give back",
            why="a module is called, and a step changes parameters and the state of an optimizer",
            remedy="run it with program.bind(model, optimizer); for modules, capture(model, backward=loss)",
        )


def _warn_about_dissolved(plan: Plan) -> None:
    """Say which preserved modules are part of their caller's graph: others in their place would not run."""
    sites = [
        f"{plan.site(flat.number)} ({flat.reason})"
        for flat in plan.flattened
        if flat.phase is Phase.FORWARD and flat.number in plan.program.calls.preserved
    ]
    if sites:
        warnings.warn(
            f"their callers' graphs hold these modules, and replacing them does nothing: {', '.join(sites)}",
            stacklevel=4,
        )

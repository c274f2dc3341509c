"""Switches of the process that decide what torch does: as they were at capture."""

from collections.abc import Container, Iterable, Iterator, Sequence

import torch

from whence._torch.autograd.mode_questions import GRAD
from whence._torch.autograd.switches import READ, READ_BY_NAME, READ_ON_CUDA
from whence._torch.observe.hooks import global_hooks
from whence._torch.tensors import is_on
from whence.dependence.describe import Describer, described_hooks
from whence.program import FlatProgram
from whence.program.guards.expectations import ExpectedConstant, Hooks
from whence.program.guards.guards import GLOBAL_HOOKS
from whence.program.guards.rows import Guard, Violation
from whence.schema import GuardKind

ALL_READ = READ | READ_ON_CUDA | {name: row[:2] for name, row in READ_BY_NAME.items()}


def mode_guards(program: FlatProgram, named: Container[str]) -> Iterator[Guard]:
    """One guard for each switch.

    A program with its own backward, or where nothing requires gradients, does not depend on grad mode, nor
    does a forward of whole composites, but where the model asked for it. On inference mode and what else no
    operation looks at only code depends that asked, or has the question among the names that it has `named`.
    """
    asked = {mode.name: mode for mode in program.circumstances.modes}
    without = set() if _depends_on_grad_mode(program) else {GRAD}
    without |= set() if _is_on_cuda(program) else READ_ON_CUDA.keys()
    for name, (read, reason) in ALL_READ.items():
        if name in asked:
            mode = asked[name]
            yield Guard(GuardKind.MODE, name, ExpectedConstant(mode.value), reason, name, source=mode.source)
        elif name not in without and (name not in READ_BY_NAME or _is_named(READ_BY_NAME[name][2], named)):
            yield Guard(GuardKind.MODE, name, ExpectedConstant(read()), reason, name)
    why = "they run in every module call, and what they did is part of the program"
    yield Guard(GuardKind.HOOKS, GLOBAL_HOOKS, _hooks_of_all(), why, GLOBAL_HOOKS)


def _is_on_cuda(program: FlatProgram) -> bool:
    """Whether something comes from there, or is made there."""
    values = (row.value for row in program.signature.inputs)
    made = (given.get("device") for node in program.graph.nodes if (given := node.kwargs))
    return any(is_on("cuda", value) for value in values) or any(
        isinstance(device, torch.device) and device.type == "cuda" for device in made
    )


def _depends_on_grad_mode(program: FlatProgram) -> bool:
    if program.has_backward or not program.signature.requires_gradients:
        return False
    circumstances = program.circumstances
    return program.step is not None or circumstances.taken_apart or bool(circumstances.opaque)


def _is_named(words: Iterable[str], named: Container[str]) -> bool:
    return any(word in named for word in words)


def mode_violations(guards: Sequence[Guard]) -> Iterator[Violation]:
    """Switches that have been turned, and hooks that fire for every module."""
    for guard in guards:
        if guard.name == GLOBAL_HOOKS:
            is_none = guard.expected == Hooks() and not any(global_hooks().values())
            if not is_none and (found := _hooks_of_all()) != guard.expected:
                yield Violation(guard, str(found))
            continue
        value = ALL_READ[guard.name][0]()
        if isinstance(guard.expected, ExpectedConstant) and guard.expected.value != value:
            yield Violation(guard, str(value))


def _hooks_of_all() -> Hooks:
    rows = ((kind.removesuffix("s"), hook) for kind, hooks in global_hooks().items() for hook in hooks)
    return described_hooks(list(rows), Describer({}))

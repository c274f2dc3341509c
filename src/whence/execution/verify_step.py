"""Is the program of a training step the step, bit for bit?

Both run from the same seed on the same inputs, state and optimizer, and what either changes is given back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from whence._torch.graphs import nodes_in
from whence._torch.observe.compile_flags import compiled_functions_run_eagerly, compiling_on_this_thread
from whence._torch.observe.training_steps import as_one_optimizer, is_stepping, members_of, schedules_in
from whence._torch.pytrees import tree_flatten
from whence._torch.tensors import untouched
from whence.dependence.asking import Failed, attempt
from whence.dependence.snapshots import save_all
from whence.errors import UsageError
from whence.execution.bound import Bound, Check
from whence.execution.compare import Comparison
from whence.execution.running import (
    Run,
    copied,
    noted,
    numbers_kept,
    refuse_without_numbers,
    same_start,
    seed_of_its_way,
)
from whence.execution.values.first import Watcher, border_gradients, calls_beside, first_unequal
from whence.execution.values.walk import walk
from whence.execution.verify import Verification, compared, with_calls
from whence.program import FlatProgram, Named
from whence.program.arguments.optimizer_arguments import Step, is_number
from whence.program.names import InWords, OfClass
from whence.program.state import refuse_elsewhere
from whence.schema import InputKind
from whence.tracing.answers import told_to
from whence.tracing.steps.enclosed_state import enclosed_by
from whence.tracing.steps.optimizer import Optimizing, optimizer_restored, optimizing
from whence.tracing.target.eligibility import refuse_uninitialised
from whence.tracing.target.subject import Subject, subject_of, tensors_by_name

P = TypeVar("P", bound=FlatProgram)


def verify_step(
    program: FlatProgram,
    model: object,
    inputs: tuple[Any, Any],
    optimizer: object,
    check: Check,
    by: str | None = None,
) -> Verification:
    """Compare a program with the step that it was captured from: outputs, state, gradients, optimizer; `by`
    "call" what each call of a module returns, and the gradient of that, too.

    Both begin without gradients. Raises `UsageError` for another model or optimizer than the step runs.
    """
    step: Any = program.step
    refuse_elsewhere(program)
    subject = subject_of(model)
    refuse_uninitialised(subject)
    refuse_without_numbers(subject, inputs)
    optimizer = step.optimizer if optimizer is None else as_one_optimizer(optimizer)
    _refuse_others(program, subject, optimizer)
    program.convention.flatten(*inputs)
    found = optimizing(subject, optimizer)

    def run_program(program: FlatProgram, seed: int | None = None) -> Run:
        return run(Bound(program, model, optimizer, check), seed)

    def run(call: Callable[..., Any], seed: int | None = None) -> Run:
        return _run(program, subject, found, (inputs, begins if seed is None else seed), call)

    def run_told() -> Run:
        with compiling_on_this_thread(told_to(program.asked), is_stepping):
            return run(step.call)

    def by_call() -> Iterator[Comparison]:
        noting, watcher = _Noting(program, model, optimizer, check), Watcher(subject)
        run(noting)
        run(watcher.watching(program)(step.call))
        return calls_beside(program, watcher, noting.noted)

    begins = seed_of_its_way(program, partial(run_program, program))
    eager = run(step.call)
    told = run_told if program.asked else None
    result = compared(program, eager, run_program, told, lambda: first_unequal(by_call()))
    return with_calls(result, by_call()) if by else result


class _Noting(Bound):
    """A bound program that notes what the calls of modules in it returned, and the gradients of that."""

    @cached_property
    def noted(self) -> dict[str, Any]:
        return {}

    def _computed(self, _values: Mapping[str, Any], arguments: Sequence[Any]) -> tuple[None, Any]:
        program = self.program
        (results,) = program.graph.output_node().args
        leaves = [leaf for call in program.calls if call.outputs is not None for leaf in call.outputs.leaves]
        returned = {leaf.name for leaf in leaves if isinstance(leaf, Named)}
        returned |= border_gradients(program)
        inputs = {row.name: value for row, value in zip(program.signature.inputs, arguments, strict=True)}
        for node, found in walk(program, inputs, keep=frozenset(node.name for node in nodes_in(results))):
            if node.name in returned:
                value = found[node.name]  # which may lie in state that the step writes when it is over
                self.noted[node.name] = value.clone() if isinstance(value, Tensor) else value
        return None, fx.map_arg(results, lambda node: found[node.name])


def with_step(program: P, call: Callable[..., Any] | None, optimizer: object) -> P:
    """The program with the function of its step, and with the optimizer where a file kept its class alone.

    Raises `UsageError` where they are not given, for one of another class, and for a step of no step.
    """
    step: Any = program.step
    if step is None:
        if call is not None:
            raise UsageError("the program is no training step", remedy="leave step out")
        return program
    told = [f"the function {step.call}"] if call is None and isinstance(step.call, InWords) else []
    kept = step.optimizer if isinstance(step.optimizer, OfClass) else None
    told += [f"the optimizer, {kept}"] if kept is not None and optimizer is None else []
    if told:
        raise UsageError(
            f"a file keeps the name alone of {' and of '.join(told)}",
            remedy="give both: program.verify(model, args, optimizer=optimizer, step=the_function)",
        )
    if kept is not None:
        found = as_one_optimizer(optimizer)
        if type(found).__name__ != kept.kind.__name__:
            raise UsageError(
                f"the step was captured with {kept}, and the optimizer is a {type(found).__name__}"
            )
        step = replace(step, optimizer=found)
    return program.with_changes(step=step if call is None else replace(step, call=call))


def runs_itself(program: FlatProgram, model: object, optimizer: object) -> bool:
    """Whether a program is that of a step as it was captured, and the step runs this model and optimizer."""
    step, subject = program.step, attempt(lambda: subject_of(model))
    is_as_captured = step is not None and step.graph is program.graph_module
    if not is_as_captured or isinstance(subject, Failed):
        return False
    return not (_other_state(program, subject) or _is_other_optimizer(program, as_one_optimizer(optimizer)))


def _other_state(program: FlatProgram, subject: Subject) -> list[str]:
    tensors = tensors_by_name(subject)
    rows = [row for row in program.signature.state if row.path in tensors]
    return [row.path for row in rows if tensors[row.path] is not program.state[row.name]]


def _is_other_optimizer(program: FlatProgram, optimizer: object) -> bool:
    return program.step is not None and members_of(optimizer) != members_of(program.step.optimizer)


def _refuse_others(program: FlatProgram, subject: Subject, optimizer: object) -> None:
    others = _other_state(program, subject)
    if others or _is_other_optimizer(program, optimizer):
        raise UsageError(
            "verify runs the captured step itself, and that runs the captured model and optimizer",
            why=f"{', '.join(others[:3])} are other tensors" if others else "the optimizer is another one",
            remedy="pass these (of a file: whence.load(path, model=model)), or capture the step of the other",
        )


def _run(
    program: FlatProgram,
    subject: Subject,
    found: Optimizing,
    start: tuple[Any, int],
    call: Callable[..., Any],
) -> Run:
    step: Any = program.step
    rows = program.signature.inputs_of(InputKind.CONSTANT)
    constants = [program.state[row.name] for row in rows if row.name in program.state]
    with (
        same_start(subject, start[0], constants, start[1]) as given,
        optimizer_kept(found),
        _host_state_restored(step),
    ):
        if step.second:
            again = copied(start[0])
            step.call(*again[0], **again[1])
        tensors = tensors_by_name(subject)
        for name in step.with_gradient:
            tensors[name].grad = tensors[name].detach().clone()
        with compiled_functions_run_eagerly(spares_operators=True):
            result = call(*given[0], **given[1])
        now = tensors_by_name(subject)  # another tensor may have taken the place of a buffer
        tensors = {name: now.get(name, tensor) for name, tensor in tensors.items()}
        held = {row.path: _as_tensor(row.value) for row in found.entries(None) if row.value is not None}
        held |= {row.path: _as_tensor(row.value) for row in found.settings() if is_number(row.value)}
        held |= {path: _as_tensor(value) for path, value in _host_state(step)}
        return noted(program, given, result, tensors, held)


def _host_state(step: Step) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors that a step leaves in Python around it."""
    now = step.as_kept_now() or step
    rows = [(row.place.path, row.value) for row in now.counted]
    rows += [(row.place.path, row.left) for row in now.effects]
    return ((path, value) for path, value in rows if is_number(value) or isinstance(value, Tensor))


def _as_tensor(value: Any) -> Tensor:
    """State as it is compared; a number is as precise as Python has it."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64)


@contextmanager
def _host_state_restored(step: Step) -> Iterator[None]:
    """Give back what a step changes in Python around it, and the numbers of tensors that it writes there
    before it puts others in their place."""
    places = (step.as_kept_now() or step).places
    ways = [place.way_back() for place in places]
    held = [leaf for place in places for leaf in tree_flatten(place.now())[0] if isinstance(leaf, Tensor)]
    ways += [enclosed_by(step.call).restore] if step.second else []
    schedules = [held for call in step.calls for held in schedules_in(call.schedule)]
    ways += [row.restore for schedule in schedules for row in save_all("schedule", schedule)]
    ways.append(numbers_kept(held))
    try:
        yield
    finally:
        for way in ways:
            way()


@contextmanager
def optimizer_kept(found: Optimizing) -> Iterator[None]:
    """Give an optimizer back with the numbers it had."""
    values = [*(row.value for row in found.entries()), *(row.value for row in found.settings())]
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = numbers_kept(tensors)
    restore = optimizer_restored(found.optimizer)
    with untouched(tensors):
        try:
            yield
        finally:
            restore()
            numbers()

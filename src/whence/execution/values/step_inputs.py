"""What the graph of a step takes beside arguments and the model's tensors: from an optimizer as it is now."""

from collections.abc import Mapping
from typing import Any

from whence._torch.observe.training_steps import as_one_optimizer, is_optimizer
from whence.errors import StaleCapture, UsageError
from whence.execution.bound import other_optimizer
from whence.execution.live_run import Live
from whence.execution.values.walk import Given
from whence.program import FlatProgram
from whence.program.arguments.variants import fitting
from whence.schema import InputKind


def given_to(
    program: FlatProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    inputs: Mapping[str, Any] | None,
    optimizer: object,
) -> tuple[FlatProgram, Given]:
    """The program that admits these arguments, and all that a run of it is given; `inputs` go before what an
    optimizer holds."""
    program = fitting(program, args, kwargs)
    held = {} if optimizer is None else _held(program, args, kwargs, optimizer)
    return program, (args, kwargs, held | dict(inputs or {}))


def _held(
    program: FlatProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, optimizer: object
) -> dict[str, Any]:
    """State and settings of an optimizer, and what else a step reads around itself, by name of placeholder.

    State that a first step would make is made for the run alone. Raises `UsageError` for another optimizer
    than the step needs, and `StaleCapture` where what is a constant of the program is not what it was.
    """
    held: Any = as_one_optimizer(optimizer)
    if program.step is None or not program.step.groups:
        raise UsageError("the program knows no optimizer", remedy="leave optimizer out")
    if not is_optimizer(held):
        raise UsageError(f"{type(held).__name__} is no optimizer", remedy="give that of the step")
    rows = [row for row in program.signature.state if row.name in program.state]
    tensors = {path: program.state[row.name] for row in rows for path in (row.path, *row.aliases)}
    UsageError.refuse(other_optimizer(program, tensors, held))
    live = Live(program, tensors, program.convention.flatten(args, dict(kwargs or {})), held)
    StaleCapture.refuse(live.lost())
    live.refuse()
    undo = live.begin()
    try:
        values = live.values()
    finally:
        undo()
    found = program.signature.inputs_of(InputKind.OPTIMIZER_STATE, InputKind.STEP_STATE)
    return {row.name: values[row.name] for row in found if row.name in values}

"""A step as it would go on another device: what it changes lies there while it is recorded.

A step closes over the live model and its optimizer, so no copy can run in their place. Their tensors
themselves are exchanged for fakes that say they are there, and given back.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from whence._torch.elsewhere.in_place import TwinsInPlace
from whence._torch.elsewhere.target import Twins, is_movable
from whence._torch.observe.hooks import gradient_hooks
from whence._torch.pytrees import tree_flatten
from whence.dependence.observed import Observed
from whence.errors import Fault, UsageError
from whence.program import FlatProgram
from whence.tracing.sandbox.undo import Undoing
from whence.tracing.target.elsewhere import input_faults, state_faults, twin_arguments
from whence.tracing.target.example import Given
from whence.tracing.target.subject import Subject

S = TypeVar("S")


def recorded_there(
    given: Given,
    subject: Subject,
    beside: Mapping[str, Tensor],
    record: Callable[[Given], tuple[FlatProgram, Observed, S]],
) -> tuple[FlatProgram, Observed, S]:
    """What `record` gives while the tensors of a model, their gradients, and others `beside`, by their names,
    are on the device themselves; as they are where none is wanted.

    Raises `UsageError` naming all that cannot be there.
    """
    if given.elsewhere is None:
        return record(given)
    UsageError.refuse(
        [*state_faults(subject), *_faults_in_place(subject, beside, given), *input_faults(given)]
    )
    twins, undoing = Twins(given.elsewhere, vary=given.dynamic_shapes is not None), Undoing()
    state = [row.tensor for row in subject.state]
    gradients = [tensor.grad for tensor in state if tensor.is_leaf and tensor.grad is not None]
    moving = {id(tensor): tensor for tensor in (*gradients, *state, *beside.values())}
    there = TwinsInPlace((tensor, twins.of(tensor)) for tensor in moving.values())
    args, kwargs = twin_arguments(twins, given)

    def run() -> tuple[FlatProgram, Observed, S]:
        there.put()
        return record(replace(given, args=args, kwargs=kwargs))

    undoing.later(there.give_back)
    program, observed, session = undoing.around(run)
    held = {name: there.twins.get(id(tensor), tensor) for name, tensor in program.state.items()}
    return program.with_changes(state=held), replace(observed, there=there.twins), session


def _faults_in_place(subject: Subject, beside: Mapping[str, Tensor], given: Given) -> Iterator[Fault]:
    """What is in the way of an exchange."""
    names = {id(row.tensor): row.paths[0] for row in subject.state}
    for leaf in tree_flatten((given.args, given.kwargs))[0]:
        if isinstance(leaf, Tensor) and id(leaf) in names:
            yield Fault(
                f"an input is {names[id(leaf)]} of the model",
                why="each is a tensor of its own there",
                remedy="pass a copy (tensor.detach().clone()), or let the step read it from the model",
            )
    for row in subject.state:
        gradient = row.tensor.grad if row.tensor.is_leaf else None
        if gradient is not None and not is_movable(gradient):
            words, remedy = f"the gradient of {row.paths[0]}", "take it away before: optimizer.zero_grad()"
            yield Fault(f"{words} is no plain dense tensor", remedy=remedy)
        if hooks := "; ".join(gradient_hooks(row.tensor)):
            yield Fault(
                f"{row.paths[0]} has gradient hooks: {hooks}",
                why="they belong to the tensor that is here, and another takes its place for the capture",
                remedy="capture the step without device, or do in the step what the hooks do",
            )
    for path, tensor in beside.items():
        if not is_movable(tensor):
            remedy = "with device, the state of an optimizer is plain dense tensors"
            yield Fault(f"{path} is a {type(tensor).__name__}", remedy=remedy)

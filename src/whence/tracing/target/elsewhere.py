"""A model and its inputs as they would be on another device: copies over fake tensors; nothing is moved."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from whence._torch.elsewhere.recorder import told
from whence._torch.elsewhere.target import CAPABILITIES, Elsewhere, Twins, is_movable, spelled
from whence._torch.pytrees import tree_flatten, tree_unflatten
from whence.dependence.observed import Observed
from whence.errors import Fault, UsageError
from whence.program import FlatProgram
from whence.tracing.target.example import Given
from whence.tracing.target.subject import Subject, subject_of


@dataclass(frozen=True)
class Relocated:
    """What is captured in the place of what was given."""

    model: Callable[..., Any]
    given: Given
    backward: Any


def captured_for_device(
    given: Given, capture: Callable[[Given], tuple[FlatProgram, Observed]]
) -> tuple[FlatProgram, Observed]:
    """What `capture` gives, for the device that is asked for; else for that on which the tensors are."""
    elsewhere = _elsewhere_of(given)
    if elsewhere is None:
        return capture(given)
    with told(elsewhere):
        program, observed = capture(replace(given, elsewhere=elsewhere))
    return program.under(device=str(elsewhere), presumed=tuple(elsewhere.presumed)), observed


def _elsewhere_of(given: Given) -> Elsewhere | None:
    """The device that is asked for; raises `UsageError` where it is none, or values are asked for, too."""
    elsewhere = elsewhere_named(given.device)
    if elsewhere is not None and given.decide is not None:
        raise UsageError(
            f"device does not work with decide={given.decide!r}",
            why="values of the example would be computed on the device, which need not be here",
            remedy="capture where the device is, or on the CPU",
        )
    return elsewhere


def elsewhere_named(device: object) -> Elsewhere | None:
    """The device of that name; None where none is wanted. Raises `UsageError` for what means none."""
    if device is None:
        return None
    found = spelled(device)
    if found is None:
        known = ", ".join(f"'cuda:{name}'" for name in CAPABILITIES)
        raise UsageError(
            f"device cannot be {device!r}",
            why="a program is captured for the device of its tensors, or for a CUDA device by its rules",
            remedy=f"use 'cuda', 'cuda:1', or with what it is capable of {known}",
        )
    return found


def moved(model: Callable[..., Any], given: Given, backward: Any) -> Relocated:
    """Copies over fake tensors on the device that is wanted; what was given where none is.

    Parameters, buffers and inputs are there, as after `.to`; tensors that modules hold as plain attributes
    are where they were. Raises `UsageError` for what cannot be copied, naming all.
    """
    elsewhere = given.elsewhere
    if elsewhere is None:
        return Relocated(model, given, backward)
    subject = _checked_subject(model, given)
    twins = Twins(elsewhere, vary=given.dynamic_shapes is not None)
    twins.stay(value for _, _, _, value in subject.things if isinstance(value, Tensor))
    with_twins = partial(_copy_of_module, twins)
    args, kwargs = twin_arguments(twins, given)
    for row in subject.state:
        twins.of(row.tensor)
    loss = with_twins(backward) if _is_of_module(backward) else backward
    return Relocated(with_twins(model), replace(given, args=args, kwargs=kwargs), loss)


def _checked_subject(model: Callable[..., Any], given: Given) -> Subject:
    subject = subject_of(model)
    UsageError.refuse([*_model_faults(subject, model), *input_faults(given)])
    return subject


def _model_faults(subject: Subject, model: object) -> Iterator[Fault]:
    if not _is_of_module(model):
        yield Fault(
            f"{subject.name} is no module",
            why="what a function reads of modules and tensors around it cannot be put on another device",
            remedy="with device, pass the module itself or a method of it",
        )
    yield from state_faults(subject)


def state_faults(subject: Subject) -> Iterator[Fault]:
    """The parameters and buffers that no twin stands for."""
    for row in subject.state:
        if is_lazy(row.tensor) or not is_movable(row.tensor):
            yield Fault(
                f"{row.paths[0]} is a {type(row.tensor).__name__}",
                why="with device, parameters and buffers are plain dense tensors",
                remedy="run a lazy model once; capture one of composed tensors on its own device",
            )


def input_faults(given: Given) -> Iterator[Fault]:
    """The inputs that no twin stands for."""
    leaves = tree_flatten((given.args, given.kwargs))[0]
    strange = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not is_movable(leaf)]
    for leaf in strange:
        yield Fault(f"an input is a {type(leaf).__name__}", remedy="with device, pass plain dense tensors")


def _is_of_module(thing: object) -> bool:
    return isinstance(thing.__self__ if isinstance(thing, MethodType) else thing, nn.Module)


def twin_arguments(twins: Twins, given: Given) -> Any:
    """The arguments, there."""
    leaves, spec = tree_flatten((given.args, given.kwargs))
    return tree_unflatten([twins.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _copy_of_module(twins: Twins, thing: Any) -> Any:
    """A copy of a module or of a bound method of one; the module's own attributes are copied, too."""
    try:
        return twins.copy_of(thing)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise UsageError(
            f"{type(thing).__name__} cannot be copied: {error}",
            why="the capture for another device runs a copy of the model over fake tensors",
            remedy="let copy.deepcopy(model) work: give what cannot be copied a __deepcopy__ of its own",
        ) from error

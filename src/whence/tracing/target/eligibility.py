"""Kinds of modules and tensors that cannot be recorded: refused before the run, all at once."""

import torch
from torch import nn

from whence._torch.observe.hooks import gradient_hooks, has_own_hooks
from whence._torch.observe.scripted import is_packed_weight
from whence._torch.observe.wrappers import processes_averaged
from whence._torch.subclasses.lazy_modules import uninitialised
from whence._torch.subclasses.wrapper_subclasses import kind_of, untraceable
from whence.errors import (
    Fault,
    NotCallable,
    Place,
    UnsupportedHook,
    UnsupportedInput,
    UnsupportedModule,
    UsageError,
)
from whence.provenance import ModulePath
from whence.tracing.target.subject import Subject, left_out, loose_tensors


def refuse_kinds(subject: Subject, *, differentiates: bool) -> None:
    """Raise a `CaptureError` that names every module or tensor of a kind that cannot be recorded."""
    refuse_uninitialised(subject)
    _refuse_subclasses(subject)
    hooked = [module for module in subject.wrappers if has_own_hooks(module)]
    if hooked:
        raise UnsupportedHook(
            f"there are hooks on {', '.join(type(module).__name__ for module in hooked)}",
            why="the capture sees through the wrapper to the module inside, and would not run them",
            remedy="register them on the module inside: model.module, or model._orig_mod when it is compiled",
        )
    if differentiates:
        _refuse_averaging(subject)


def refuse_gradient_hooks(subject: Subject) -> None:
    """Raise `UnsupportedHook` for hooks that fire when the gradient of a parameter arrives, naming all."""
    hooked = [
        f"{row.paths[0]} ({', '.join(names)})"
        for row in subject.state
        if (names := gradient_hooks(row.tensor))
    ]
    if hooked:
        raise UnsupportedHook(
            f"there are gradient hooks on parameters: {'; '.join(hooked)}",
            why="the captured backward would contain what they do, and autograd would run them once more",
            remedy="remove them for the capture and register them again afterwards: the program's modules "
            "share the parameters, so they fire there as they do in eager",
        )


def refuse_inference_mode(name: str) -> None:
    """Raise `UsageError` where a backward would be captured under inference mode."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"a backward of {name} is to be captured, and torch.inference_mode() is on",
            why="autograd records nothing in it, so there is no backward in eager, either",
            remedy="capture it outside, on tensors that were made outside; or capture the forward",
        )


def refuse_uninitialised(subject: Subject) -> None:
    """Raise `NotCallable` for parameters and buffers without a shape, naming all."""
    names = [
        f"{path.child(name)}" for path, module in subject.named_modules() for name in uninitialised(module)
    ]
    if names:
        raise NotCallable(
            f"{', '.join(dict.fromkeys(names))} are not initialised",
            where=Place(subject.name),
            why="a lazy module makes its parameters in its first call, and the model does not call it",
            remedy="remove modules that are not used, or call the model once on inputs that reach them",
        )


def _module_in_words(path: ModulePath, module: nn.Module) -> str:
    return f"{path or '(root)'} ({type(module).__name__})"


def _refuse_subclasses(subject: Subject) -> None:
    """Tensors whose operations a recording does not see, and packed weights."""
    held = {row.paths[0]: row.tensor for row in subject.state}
    held |= dict(loose_tensors(subject))
    unread = {id(tensor) for _, tensor in left_out(subject)}
    faults = [
        Fault(
            f"{path.child(name)} is a packed quantised weight",
            where=Place(str(path)),
            why="its numbers are kept in the form of one backend, where no operation finds them",
            remedy="capture the model before it is quantised, or quantise it with tensor subclasses",
        )
        for path, _, name, value in subject.things
        if is_packed_weight(value)
    ]
    faults += [
        Fault(f"{path} is a {kind_of(tensor)}", where=Place(str(path.parent)), why=found[0], remedy=found[1])
        for path, tensor in held.items()
        if id(tensor) not in unread and (found := untraceable(tensor))
    ]
    UnsupportedInput.refuse(faults)


def _refuse_averaging(subject: Subject) -> None:
    """A data-parallel module averages gradients between processes; a program does not."""
    averaging = [
        (path, module, n)
        for path, module in subject.named_wrappers()
        if (n := processes_averaged(module)) > 1
    ]
    if averaging:
        spelled = [f"{_module_in_words(path, module)} over {n} processes" for path, module, n in averaging]
        raise UnsupportedModule(
            f"gradients are averaged by {', '.join(spelled)}",
            why="the program is the local computation, and the gradients of its backward are not averaged",
            remedy="capture the forward, or capture the module inside (model.module) and average the "
            "gradients that its program returns",
        )

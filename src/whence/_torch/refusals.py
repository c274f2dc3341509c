"""Errors for what a model does with its tensors while it is recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.numbers import AS_TEXT, RecordedNumber
from whence._torch.subclasses.wrapper_subclasses import kind_of, untraceable
from whence.errors import (
    CaptureError,
    DataDependent,
    Place,
    UnsupportedGenerator,
    UnsupportedHook,
    UnsupportedInput,
    UnsupportedMutation,
    UnsupportedOperator,
)

_OTHER_CLASS = "Creating a new Tensor subclass"
"""What PyTorch says where a tensor that Python knows already is to be of another class."""
_TWO_DEVICES = "FakeTensorDeviceMismatchError"
"""How PyTorch calls the error of a fake tensor that meets one of another device."""


def data_replaced(why: str, where: Place) -> UnsupportedMutation:
    """The error for `tensor.data = …` that a program could not repeat."""
    return UnsupportedMutation(
        "the model puts other data under one of its own tensors",
        where=where,
        why=f"`.data = …` puts the memory of another tensor there: {why}",
        remedy="write with tensor.data.copy_(…), or under torch.no_grad()",
    )


def history_written(argument: str, where: Place) -> UnsupportedMutation:
    """The error for a write to an argument that was computed of what requires a gradient."""
    return UnsupportedMutation(
        f"the model writes to {argument}, which was computed of other tensors that require a gradient",
        where=where,
        why="a program's gradients end at its arguments, and autograd lets nobody write to where they end; "
        "in eager they go on through what made it",
        remedy="write to a copy: x = x.clone(); or pass x.detach(), where no gradient is to go on",
    )


def history_followed(tensor: str, where: Place) -> UnsupportedInput:
    """The error for a tensor from outside through which a backward would go on."""
    return UnsupportedInput(
        f"the model computes with {tensor}, which an earlier call has made of what requires a gradient",
        where=where,
        why="the backward would go on through that call, as eager's does once: it frees what it goes "
        "through, and a program runs again and again",
        remedy="clear it before the capture, so that the call makes it itself; or keep it detached, where no "
        "gradient is to go on",
    )


def overwritten_before_backward(function: str, where: Place) -> UnsupportedMutation:
    """The error for a tensor that autograd had saved."""
    return UnsupportedMutation(
        f"a tensor that {function} saved for its backward was written in place afterwards",
        where=where,
        why="the derivative is computed from what is no longer there; autograd refuses it in eager, too",
        remedy="write out of place, or clone the tensor before it is written",
    )


def hook_kept(name: str, held: str, where: Place, *, is_parameter: bool) -> UnsupportedHook:
    """The error for a gradient hook that forward puts on a parameter, or on what it was given."""
    if is_parameter:
        why, remedy = "it would stay there, once for every run", "register it once, outside forward"
    else:
        why = "it would stay there, and change what others do with the tensor, too"
        remedy = "put it on a tensor that the model makes, such as x.view_as(x)"
    return UnsupportedHook(
        f"the gradient hook {name} is put on {held} while the model runs", where=where, why=why, remedy=remedy
    )


def hook_met(name: str, held: str, where: Place) -> UnsupportedHook:
    """The error for a gradient hook of others on a tensor whose gradient the model asks for."""
    return UnsupportedHook(
        f"the model asks for the gradient of {held}, on which is the gradient hook {name}",
        where=where,
        why="it runs there in eager, and a program would not run what is on the tensor then",
        remedy="remove it, and do in the model what it does with what torch.autograd.grad gives",
    )


def dropout_kept_by_cudnn(where: Place) -> UnsupportedOperator:
    """The error for random numbers that no generator of torch's gives."""
    return UnsupportedOperator(
        "dropout between the layers of a recurrent network cannot be recorded for cuda",
        where=where,
        why="cuDNN keeps the state of that dropout in the process, and no seed brings it back",
        remedy="take dropout=0 and networks of one layer each, with nn.Dropout between them",
    )


def object_met(operation: object, met: object, where: Place) -> CaptureError:
    """The error for an operation with a random generator of its own, or an object of a foreign class."""
    user = op_name(operation)
    if isinstance(met, torch.Generator):
        return UnsupportedGenerator(
            f"{user} draws from a generator of its own",
            where=where,
            why="a program draws from the default generator; another one is an object outside the graph",
            remedy="draw from the default generator, or pass the drawn tensor in as an input",
        )
    return object_used(f"{user} is given", met, where)


def object_used(how: str, met: object, where: Place) -> UnsupportedInput:
    """The error for an object of TorchScript's, or an opaque one, that the model uses."""
    return UnsupportedInput(
        f"{how} a {type(met).__name__}, an object that is no tensor",
        where=where,
        why="a program holds tensors and constants, and neither what such an object holds nor what it does",
        remedy="take it out of forward, and pass tensors instead",
    )


def sparse_read(name: str, tensor: Tensor, where: Place) -> UnsupportedInput:
    """The error for a sparse tensor of a module's that the run reads."""
    why, remedy = untraceable(tensor) or ("", "")
    return UnsupportedInput(f"{name} is a {kind_of(tensor)}", where=where, why=why, remedy=remedy)


def casts_inside(function: object, where: Place) -> UnsupportedOperator:
    """The error for an operator whose kernel calls others, under autocast."""
    return UnsupportedOperator(
        f"{op_name(function)} runs under autocast, and casts inside of its kernel",
        where=where,
        why="a program has the casts of autocast as operations, and runs without it; inside of one operator "
        "there are none, and it would compute other numbers",
        remedy="put `with torch.autocast(x.device.type, enabled=False):` around it; encoder layers and "
        "attention take no such way after torch.backends.mha.set_fastpath_enabled(False)",
    )


def refuse_switched(function: object, turned: list[str], given: Any, here: Callable[[], Place]) -> None:
    """Raise where the model has turned switches of the process that this operator looks at; the dtype of what
    is made matters where no tensor or argument says it."""
    if not turned or (turned == ["default dtype"] and any(map(_says_dtype, tree_flatten(given)[0]))):
        return
    raise UnsupportedOperator(
        f"{op_name(function)} runs after the model has turned a switch of PyTorch's: {', '.join(turned)}",
        where=here(),
        why="a program runs all of its operators with the switches of its caller, and this one would compute "
        "something else",
        remedy="turn it around the capture, and around the runs; give the dtype where tensors are made",
    )


def _says_dtype(leaf: object) -> bool:
    is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return is_float or isinstance(leaf, torch.dtype)


def resized(name: str, where: Place) -> UnsupportedMutation:
    """The error for a tensor of the model's that `out=` or `resize_` gives another shape."""
    return UnsupportedMutation(
        "the model gives one of its own tensors another shape",
        where=where,
        why=f"whoever holds {name} would have a tensor of another shape afterwards",
        remedy="let it have its shape from the beginning, or assign a new tensor to the attribute",
    )


def nested_met(where: Place) -> DataDependent:
    """The error for an encoder that packs its input into a nested tensor."""
    return DataDependent(
        "the model makes a nested tensor, and the values of a mask decide its sizes",
        where=where,
        why="a capture runs on shapes without numbers; nn.TransformerEncoder does so in eval mode, without "
        "gradients, where src_key_padding_mask leaves out the ends of rows alone",
        remedy="make the encoder with enable_nested_tensor=False; capture it with gradients, for runs with "
        'gradients; or with decide="example", where the mask of the example leaves out others, too',
    )


def made_unseen(where: Place) -> UnsupportedOperator:
    """The error for a fake tensor of the run that no operation made: a program would have it as it is."""
    return UnsupportedOperator(
        "the model makes a tensor of another in a way that no capture sees",
        where=where,
        why="`as_subclass(torch.Tensor)` and `Tensor._make_subclass` go past PyTorch's dispatcher; what "
        "reads the result here would read a constant",
        remedy="use the tensor itself, or x.view_as(x) for another one of the same memory",
    )


_AS_JSON = tuple(f"Object of type {kind} is not JSON serializable" for kind in ("int", "float"))


def is_about_number(error: BaseException | None) -> bool:
    """Whether an error is that of code in C which takes no number that only a run knows."""
    said = str(error)
    return isinstance(error, TypeError | IndexError) and (RecordedNumber.__name__ in said or said in _AS_JSON)


def number_wanted(error: BaseException, where: Place) -> DataDependent:
    """The error for such an error."""
    said = str(error).partition("\n")[0]
    is_text = said in _AS_JSON
    return DataDependent(
        f"an operation wants the {'number' if is_text else 'integer'} itself, and gets a number that only a "
        "run has",
        where=where,
        why=said,
        remedy=AS_TEXT
        if is_text
        else "write int(number) there: it is as it is now, and every run looks at it",
    )


def fake_failed(error: BaseException, where: Place) -> UnsupportedOperator:
    """The error for what PyTorch's fake tensors, on which a capture runs, cannot do."""
    said = str(error).partition("\n")[0]
    if _OTHER_CLASS in said:
        return UnsupportedOperator(
            "the model gives a tensor another class (as_subclass)",
            where=where,
            why=f"a capture runs on tensors of a class of its own, and no tensor has two; {said}",
            remedy="use a plain tensor there, or do what the class does outside the captured function",
        )
    if type(error).__name__ == _TWO_DEVICES and "meta and" in said:
        return UnsupportedOperator(
            "PyTorch cannot take one derivative of another for a batch of fake tensors, as a capture does",
            where=where,
            why=f"the zeros of its jacfwd(jacrev(f)), which is hessian(f), are on no device there: {said}",
            remedy="write vmap(jacrev(jacrev(f))) or vmap(jacfwd(jacfwd(f))) for vmap(hessian(f))",
        )
    if type(error).__name__ == _TWO_DEVICES:
        return UnsupportedOperator(
            "tensors on two devices meet",
            where=where,
            why=said,
            remedy="register as a buffer what a module holds as a plain attribute, which stays where it is "
            "when the model moves, and so does a capture for another device; create others with "
            "device=x.device; in a step, pass a tensor from outside as an argument, or a model that holds it",
        )
    return UnsupportedOperator(
        "PyTorch cannot run this on fake tensors, as a capture does",
        where=where,
        why=f"{type(error).__name__}: {said}",
        remedy="run the model once without a capture: an error there is to be mended first; else take that "
        "operation out of the captured function and pass its result in",
    )

"""Errors for what a model does with its tensors while it is recorded."""

from whence._torch.operators import op_name
from whence.errors import Place, UnsupportedGenerator, UnsupportedMutation


def data_replaced(where: Place) -> UnsupportedMutation:
    """The error for `tensor.data = …` on a tensor of the model."""
    return UnsupportedMutation(
        "the model puts other data under one of its own tensors",
        where=where,
        why="`.data = …` changes the tensor behind autograd and dispatcher, where a capture sees nothing",
        remedy="write with tensor.data.copy_(…), or under torch.no_grad()",
    )


def overwritten_before_backward(function: str, where: Place) -> UnsupportedMutation:
    """The error for a tensor that autograd had saved."""
    return UnsupportedMutation(
        f"a tensor that {function} saved for its backward was written in place afterwards",
        where=where,
        why="the derivative is computed from what is no longer there; autograd refuses it in eager, too",
        remedy="write out of place, or clone the tensor before it is written",
    )


def generator_met(operation: object, where: Place) -> UnsupportedGenerator:
    """The error for an operation with a random generator of its own."""
    return UnsupportedGenerator(
        f"{op_name(operation)} draws from a generator of its own",
        where=where,
        why="a program draws from the default generator; another one is an object outside the graph",
        remedy="draw from the default generator, or pass the drawn tensor in as an input",
    )

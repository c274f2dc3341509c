"""Errors for what a model does with its tensors while it is recorded."""

from whence._torch.hooks import described
from whence._torch.operators import op_name
from whence.errors import Place, UnsupportedGenerator, UnsupportedHook, UnsupportedMutation


def data_replaced(where: Place) -> UnsupportedMutation:
    """The error for `tensor.data = …` on a tensor of the model."""
    return UnsupportedMutation(
        "the model puts other data under one of its own tensors",
        where=where,
        why="`.data = …` changes the tensor behind autograd and dispatcher, where a capture sees nothing",
        remedy="write with tensor.data.copy_(…), or under torch.no_grad()",
    )


def generator_met(operation: object, where: Place) -> UnsupportedGenerator:
    """The error for an operation with a random generator of its own."""
    return UnsupportedGenerator(
        f"{op_name(operation)} draws from a generator of its own",
        where=where,
        why="a program draws from the default generator; another one is an object outside the graph",
        remedy="draw from the default generator, or pass the drawn tensor in as an input",
    )


def parameter_hooked(hook: object, where: Place) -> UnsupportedHook:
    """A gradient hook that the model puts on a parameter while it runs."""
    return UnsupportedHook(
        f"the gradient hook {described(hook)} is put on a parameter while the model runs",
        where=where,
        why="it would stay there, once for every run",
        remedy="register it once, outside forward",
    )

"""The closed vocabularies of the project: each is a string, so it prints and serialises as itself."""

from enum import StrEnum


class Phase(StrEnum):
    """The part of a training step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Quality(StrEnum):
    """How sure an origin is; never overstated.

    `EXACT` was seen while recording. `ACCUMULATED` is a sum of the gradients of several users, all of
    whom are named. `INFERRED` was deduced by a rule that its code states. `NONE` is not known.
    """

    EXACT = "exact"
    ACCUMULATED = "accumulated"
    INFERRED = "inferred"
    NONE = "none"


class InputKind(StrEnum):
    """What a program takes in through one placeholder."""

    USER = "user"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    TANGENT = "tangent"
    OPTIMIZER_STATE = "optimizer_state"


STATE_KINDS = frozenset({InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT})


class OutputKind(StrEnum):
    """What a program gives back in one returned value."""

    USER = "user"
    LOSS = "loss"
    GRADIENT = "gradient"
    MUTATION = "mutation"

"""The closed vocabularies of the project: each is a string, so it prints and serialises as itself."""

from enum import StrEnum


class Phase(StrEnum):
    """The part of a training step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Aspect(StrEnum):
    """What an operation is besides its phase.

    `LOSS` computes the value that is differentiated from what the model returned. `RECOMPUTED` runs again in
    the backward, for a checkpoint. `SAVED` is a value of the forward that the backward reads. `RANDOM` draws
    random numbers.
    """

    LOSS = "loss"
    RECOMPUTED = "recomputed"
    SAVED = "saved"
    RANDOM = "random"


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
    """What a program takes in through one placeholder.

    `STEP_STATE` are numbers that a step advances around it.
    """

    USER = "user"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    TANGENT = "tangent"
    OPTIMIZER_STATE = "optimizer_state"
    STEP_STATE = "step_state"


STATE_KINDS = frozenset({InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT})


class OutputKind(StrEnum):
    """What a program gives back in one returned value; an `EFFECT` is put into what is around a step."""

    USER = "user"
    LOSS = "loss"
    GRADIENT = "gradient"
    MUTATION = "mutation"
    EFFECT = "effect"


class GuardKind(StrEnum):
    """What sort of thing a capture depended on."""

    CALLABLE = "callable"
    CLASS = "class"
    CODE = "code"
    SUBMODULE = "submodule"
    STRUCTURE = "structure"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    TENSOR = "tensor"
    ALIASING = "aliasing"
    ATTRIBUTE = "attribute"
    VARIABLE = "variable"
    TRAINING = "training"
    HOOKS = "hooks"
    INPUT = "input"
    SIZE = "size"
    MODE = "mode"


class Strictness(StrEnum):
    """How a guard compares.

    `EQUAL` by type and value. `METADATA` a tensor by everything but its numbers. `TYPE` by class alone.
    `IDENTITY` by being the same object; on another instance of the captured model, where nothing can be the
    same object, by class. `SAME` by two names meaning one object, or two. `ABSENT` by not being there.
    `CONDITION` by what must hold of sizes.
    """

    EQUAL = "equal"
    METADATA = "metadata"
    TYPE = "type"
    IDENTITY = "identity"
    SAME = "same"
    ABSENT = "absent"
    CONDITION = "condition"


class TensorFact(StrEnum):
    """What a model may ask of a tensor that it is given, as Python writes it."""

    STRIDES = "stride()"
    REQUIRES_GRAD = "requires_grad"
    IS_LEAF = "is_leaf"
    STORAGE_OFFSET = "storage_offset()"
    HOOKS = "_backward_hooks"


class OnViolation(StrEnum):
    """What a guarded program does when a guard does not hold.

    `RAISE` a `StaleCapture`. `WARN`, and run the model itself for this call. `RECAPTURE`, and go on with the
    new program.
    """

    RAISE = "raise"
    WARN = "warn"
    RECAPTURE = "recapture"

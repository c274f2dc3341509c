"""What a step keeps must lie in memory of its own: eager's would change with what it is a view of."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from whence._torch.tensors import storage_of
from whence.errors import Place, UnsupportedStep
from whence.tracing.recording.run import PutValue
from whence.tracing.steps.session import StepSession


def refuse_shared_memory(session: StepSession, kept: Sequence[PutValue], place: Place) -> None:
    """Raise `UnsupportedStep` for tensors that are views of inputs of the program."""
    inputs = memory_of(map(_value, session.recorder.graph.find_nodes(op="placeholder")))
    shared = [
        row.path for row in kept if row.node.op != "placeholder" and inputs & memory_of([_value(row.node)])
    ]
    if shared:
        raise UnsupportedStep(
            f"what the step puts into {', '.join(dict.fromkeys(shared))} lies in memory of an input",
            where=place,
            why="a parameter, a buffer or an argument is written later, and eager's would change with it",
            remedy="put a copy there: tensor.detach().clone()",
        )


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def memory_of(values: Iterable[object]) -> set[int]:
    """The memory that tensors among values look into; sparse ones share none."""
    tensors = (value for value in values if isinstance(value, Tensor) and value.layout is torch.strided)
    return set(map(storage_of, tensors))


def refuse_alias(tensor: Tensor, memory: set[int], name: str) -> None:
    """Raise `UnsupportedStep` for a tensor in memory that another input has; notes its own."""
    own = memory_of([tensor])
    if own & memory:
        raise UnsupportedStep(
            f"{name} lies in memory that another input of the step has",
            why="in a functional graph they are two values, and one would not see the other change",
            remedy="keep a copy there: tensor.detach().clone()",
        )
    memory |= own

"""What a step keeps must lie in memory of its own: eager's would change with what it is a view of."""

from collections.abc import Iterable, Sequence

from torch import Tensor, fx

from whence._torch.tensors import share_memory
from whence.errors import Place, UnsupportedStep
from whence.tracing.recording.run import PutValue
from whence.tracing.steps.session import StepSession


def refuse_shared_memory(session: StepSession, kept: Sequence[PutValue], place: Place) -> None:
    """Raise `UnsupportedStep` for tensors that are views of inputs of the program."""
    inputs = [*map(_node_value, session.recorder.graph.find_nodes(op="placeholder"))]
    shared = [
        row.path for row in kept if row.node.op != "placeholder" and lies_in(_node_value(row.node), inputs)
    ]
    if shared:
        raise UnsupportedStep(
            f"what the step puts into {', '.join(dict.fromkeys(shared))} lies in memory of an input",
            where=place,
            why="a parameter, a buffer or an argument is written later, and eager's would change with it",
            remedy="put a copy there: tensor.detach().clone()",
        )


def _node_value(node: fx.Node) -> object:
    return node.meta.get("val")


def lies_in(value: object, others: Iterable[object]) -> bool:
    """Whether a value is a tensor in the memory of one of these."""
    return any(share_memory(value, other) for other in others)


def refuse_alias(tensor: Tensor, taken: list[Tensor], name: str) -> None:
    """Raise `UnsupportedStep` for a tensor in memory that another input has; notes the tensor."""
    if lies_in(tensor, taken):
        raise UnsupportedStep(
            f"{name} lies in memory that another input of the step has",
            why="in a functional graph they are two values, and one would not see the other change",
            remedy="keep a copy there: tensor.detach().clone()",
        )
    taken.append(tensor)

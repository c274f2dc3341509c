"""Refuse what a functional graph would get wrong: tensors that share memory, one of which is written."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, fx

from whence._torch.tensors import share_memory
from whence.errors import Fault, Place, UnsupportedMutation
from whence.program.node_records import origin_of
from whence.schema import InputKind, Phase
from whence.tracing.assembling.signature_rows import GraphValues
from whence.tracing.recording.run import Recorded


def refuse_shared_writes(recorded: Recorded, values: GraphValues, *, preserves: bool) -> None:
    """Raise `UnsupportedMutation` naming all that is written late, or shares its memory with something.

    Where calls are preserved, other modules may come, which know of no later write.
    """
    tensors = dict(_tensors(recorded))
    written = values.written.items()
    buffers = {node for row, node in recorded.prepared.state if row.kind is InputKind.BUFFER}
    again = set() if preserves else {node for node, value in written if node in buffers and _is_again(value)}
    once = [] if recorded.is_step else [row for row in written if row[0] not in again]
    faults = [fault for row in once for fault in _written_late(*row)]
    faults += [fault for row, _ in written for fault in _shared(row, tensors, values.written)]
    UnsupportedMutation.refuse(faults)


def refuse_tied(recorded: Recorded, in_place: Collection[fx.Node]) -> None:
    """Raise `UnsupportedMutation` for state that is put into the memory of other state, which is written in
    place: from then on eager writes both. State of an optimizer that no step reads may lie anywhere."""
    of_model = {node for _, node in recorded.prepared.state}
    memory = {node: node.meta["val"] for node in of_model}
    memory |= {
        placeholder: node.meta.get("val")
        for placeholder, node in recorded.reassigned
        if placeholder in of_model or placeholder.users
    }
    faults = [
        Fault(
            f"{placeholder.name} is put into the memory of {other.name}, and one of them is written in place",
            why="from then on eager writes both, and in a program they are two values",
            remedy="assign a copy: tensor.clone()",
        )
        for placeholder, _ in recorded.reassigned
        for other, lies in memory.items()
        if other is not placeholder and share_memory(lies, memory.get(placeholder))
        if placeholder in in_place or other in in_place
    ]
    UnsupportedMutation.refuse(faults[:1])


def _is_again(value: fx.Node) -> bool:
    """Whether a checkpoint writes in the backward what it has written in the forward."""
    return value.op != "placeholder" and origin_of(value).recomputed


def _written_late(placeholder: fx.Node, value: fx.Node) -> Iterator[Fault]:
    if value.op == "placeholder" or (origin := origin_of(value)).phase is not Phase.BACKWARD:
        return
    again = "a checkpoint that runs its region again writes state (such as running statistics) again"
    late = (
        "a program writes state when its forward is done; a hook, or other code of the backward, does later"
    )
    apart = "keep modules that write state out of the checkpoint, or turn checkpointing off"
    step = "the training step (whence.capture_step): a step writes when all of it is done"
    yield Fault(
        f"{placeholder.name} is written in the backward",
        where=Place(str(origin.place or "") or None, None if origin.source is None else str(origin.source)),
        why=again if origin.recomputed else late,
        remedy=f"{apart}; or capture {step}" if origin.recomputed else f"capture {step}",
    )


def _shared(
    placeholder: fx.Node, tensors: Mapping[fx.Node, Tensor], written: Collection[fx.Node]
) -> Iterator[Fault]:
    """Other tensors in the memory of one that is written; two that are both written are named once."""
    own = tensors.get(placeholder)
    for other, tensor in tensors.items():
        if own is None or other is placeholder or not share_memory(own, tensor):
            continue
        if other in written and other < placeholder:
            continue
        yield Fault(
            f"{placeholder.name} is written, and shares its memory with {other.name}",
            why="in a functional graph they are two values, and one would not see the other change",
            remedy="keep one of them, and take the view of it where it is used",
        )


def _tensors(recorded: Recorded) -> Iterator[tuple[fx.Node, Tensor]]:
    """Those of the model and around it, gradients of before, and arguments, each with its placeholder."""
    recorder = recorded.session.recorder
    for row, node in recorded.prepared.state:
        yield node, row.tensor
    of_step = [node for row, node in recorded.rows if row.kind is InputKind.STEP_STATE]
    literals = recorded.session.log.literals
    around = (node for node in recorder.graph.find_nodes(op="placeholder") if node.name in literals)
    for node in (*of_step, *around):
        if (tensor := recorder.real_of(node)) is not None:
            yield node, tensor
    given = [*zip(recorded.prepared.originals, recorded.prepared.nodes, strict=True)]
    first = {id(leaf): (node, leaf) for leaf, node in reversed(given) if isinstance(leaf, Tensor)}
    yield from first.values()  # one that was given twice is one

"""Results that begin a history of their own: leaves that the model made.

`y.detach().requires_grad_()`, `torch.zeros(3, requires_grad=True)` and views made under `no_grad` require
gradients, and nothing leads from them to an input. Autograd does not find that again in the graph, so the
value of such a result says it, as the value of an input does.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from whence._torch.autograd.nodes import history_of, leaves_below
from whence._torch.record.recorder import Recorder
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.tracing.recording.backward import leaves_made

BETWEEN_RESULTS = "requires_grad_() on a result that other results are computed from"


def mark_leaves(
    results: Sequence[Any], nodes: Sequence[fx.Node | None], recorder: Recorder, given: Sequence[Any]
) -> bool:
    """Let the values of such results, at `nodes`, require gradients; whether other results depend on one.
    Tensors that were `given`, and those of the model, are none of them, also where they have been written."""
    tensors = [
        (result, node)
        for result, node in zip(results, nodes, strict=True)
        if isinstance(result, Tensor) and result.requires_grad and not is_composed(result)
        if node is not None and node.op != "placeholder"
    ]
    made = {id(leaf) for leaf in leaves_made([result for result, _ in tensors], recorder)}
    made -= {*map(id, given), *recorder.adopted.nodes}
    if not made:
        return False
    below = [{id(leaf) for leaf in _below(result)} for result, _ in tensors]
    own = [row for row, leaves in zip(tensors, below, strict=True) if leaves and leaves <= made]
    for _, node in own:
        node.meta["val"] = node.meta["val"].detach().requires_grad_()
    returned = {id(result) for result, _ in own}
    rows = zip(tensors, below, strict=True)
    return any(returned & (leaves - {id(result)}) for (result, _), leaves in rows)


def _below(result: Tensor) -> list[Tensor]:
    return [result] if history_of(result) is None else leaves_below([result])

"""What is said of operations: by `torch.fx.traceback.annotate`, under one key, and which function ran."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch.fx import traceback

from whence._torch.autograd.nodes import inside_backward

CUSTOM = "custom"
"""The key of annotations among a node's metadata."""
REGION = "region"
"""The annotation that `region` makes."""
_UNREAD = "_torchdynamo_disable"


def annotations() -> dict[str, Any]:
    """What is said of the operations that are running now.

    Of functions that its compiler does not read, such as `checkpoint`, PyTorch says so in the same place.
    """
    found: dict[str, Any] = traceback.get_current_meta().get(CUSTOM) or {}
    return {key: value for key, value in found.items() if not key.startswith(_UNREAD)}


def region(name: str) -> AbstractContextManager[None]:
    """Give what runs in a `with` block a name: `program.select("region=attention")` finds it in a capture.

    Also its backward; the blocks inside of it are `attention.softmax` and the like. It changes nothing of
    what runs, and is an annotation of `torch.fx.traceback.annotate`.
    """
    around = annotations().get(REGION)
    return traceback.annotate({REGION: name if around is None else f"{around}.{name}"})


def said_of(node: fx.Node) -> Mapping[str, Any]:
    """What a node keeps."""
    return node.meta.get(CUSTOM) or {}


def annotations_restored() -> Callable[[], None]:
    """A way back to what is said now: selective checkpoints leave what they say of their operations.

    Annotations are left alone. Who made them takes them away, and may be another thread, which annotates in
    the same place: what it says now may be over then, or change.
    """
    said = _beside_annotations()

    def restore() -> None:
        now = traceback.get_current_meta()
        for key in _beside_annotations().keys() - said.keys():
            del now[key]
        now.update(said)

    return restore


def _beside_annotations() -> dict[str, Any]:
    return {key: value for key, value in traceback.get_current_meta().items() if key != CUSTOM}


def note_annotations(node: fx.Node) -> None:
    """Keep what is said of the operation that was just recorded."""
    node.meta.pop(CUSTOM, None)  # PyTorch's tracer copies what is said, in its own way
    if found := annotations():
        node.meta[CUSTOM] = found


def annotate_like(node: fx.Node, other: fx.Node | None) -> None:
    """Say of an operation what was said of the one that it differentiates."""
    if other is not None and CUSTOM in other.meta and CUSTOM not in node.meta:
        node.meta[CUSTOM] = dict(other.meta[CUSTOM])


def common_annotations(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """What is said of all these operations alike."""
    found = [said_of(node) for node in nodes]
    first, *others = found or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def note_function(tracer: Any, node: fx.Node) -> None:
    """Say on an operation which torch function was running, in the spelling that torch.export uses.

    What autograd runs comes of none.
    """
    function = tracer.torch_fn_metadata
    if function is None or node.op != "call_function" or inside_backward():
        return
    name = getattr(function, "__name__", str(function))
    node.meta["torch_fn"] = (
        f"{name}_{tracer.torch_fn_counts[function]}",
        f"{type(function).__name__}.{name}",
    )

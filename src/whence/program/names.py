"""Names: of placeholders, which say what they are, and of the modules of a hierarchy."""

import re
from collections.abc import Iterator

from torch import nn

from whence._torch.observe.wrappers import seen_through
from whence.provenance import ModulePath
from whence.schema import InputKind

PREFIXES = {
    InputKind.PARAMETER: "p",
    InputKind.BUFFER: "b",
    InputKind.CONSTANT: "c",
    InputKind.OPTIMIZER_STATE: "o",
    InputKind.STEP_STATE: "s",
}


def state_name(kind: InputKind, path: ModulePath) -> str:
    """`p_model_layers_0_weight` for the parameter `model.layers.0.weight`."""
    return "_".join([PREFIXES[kind], *path])


def as_name(path: str) -> str:
    """A path as the name of a node: letters, digits and underscores."""
    return re.sub(r"\W+", "_", path).strip("_")


def modules_within(
    path: ModulePath, module: nn.Module, above: tuple[int, ...] = ()
) -> Iterator[tuple[ModulePath, nn.Module]]:
    """A module at a path and those inside it, parents first; modules that only wrap others are seen through.

    A module that holds one of those around it, whose identities are `above`, does not lead there again.
    """
    yield path, module
    for name, child in module._modules.items():
        if child is not None and id(seen_through(child)) not in above:
            yield from modules_within(path.child(name), seen_through(child), (*above, id(module)))

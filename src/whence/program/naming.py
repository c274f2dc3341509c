"""Names of placeholders say what they are."""

from whence.provenance import ModulePath
from whence.schema import InputKind

PREFIXES = {
    InputKind.PARAMETER: "p",
    InputKind.BUFFER: "b",
    InputKind.CONSTANT: "c",
    InputKind.OPTIMIZER_STATE: "o",
}


def state_name(kind: InputKind, path: ModulePath) -> str:
    """`p_model_layers_0_weight` for the parameter `model.layers.0.weight`."""
    return "_".join([PREFIXES[kind], *path])

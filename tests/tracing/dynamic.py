"""The models of the table with inputs of other sizes."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

import whence
from tests.models import ModelCase

BATCH = Dim("batch", max=64)
SEQUENCE = Dim("sequence", max=32)
SEQUENCES = frozenset({"gpt2", "llama", "llama_checkpoint", "mistral", "qwen2", "gemma2", "gpt_neox", "opt"})
SEQUENCES |= {"mixtral", "olmoe", "qwen2_moe", "gpt2_dropout", "bert", "roberta", "distilbert", "albert"}
SEQUENCES |= {
    "electra",
    "tied_autoencoder",
    "tied_language_model",
    "named_branches",
    "shared_layer",
    "hooked",
}
SEQUENCES |= {
    "clip",
    "partly_frozen",
    "dense_experts",
    "checkpoint",
    "closure",
    "distillation",
    "variational",
}
"""Where the second dimension of every input is a length that may vary, too."""
IMAGES = frozenset({"resnet", "inplace_activations", "unet"})
"""Where height and width may vary, as far as the model lets them."""
FIXED = frozenset({"clip"})
"""Where the model needs the batch as a Python number (`len()`), so that another dimension varies."""
LENGTHS = (8, 5, 3, 11)
BATCHES = (2, 3, 5, 4)


@dataclass(frozen=True)
class Case:
    """A model of the table, its inputs, and which dimensions may vary."""

    row: ModelCase
    shapes: Any
    inputs: tuple[Any, ...]

    @property
    def call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The model and the example."""
        return self.row.make()

    def capture(self, backward: Any) -> whence.Program:
        """The program."""
        model, args, kwargs = self.call
        return whence.capture(model, args, kwargs, backward=backward, dynamic_shapes=self.shapes)

    def resized(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The inputs at four sizes, the first being that of the capture."""
        leaves, spec = self.inputs
        for batch, length in zip(BATCHES, LENGTHS, strict=True):
            sizes = {2: batch, 8: length}
            moved = [self._resized(leaf, sizes) for _, leaf in leaves]
            yield tree_unflatten(moved, spec)

    def _resized(self, leaf: Any, sizes: dict[int, int]) -> Any:
        """A tensor with its rows repeated, or cut off, to another size."""
        if not isinstance(leaf, Tensor):
            return leaf
        dims = _axes(self.row.name, leaf)
        moved = leaf.detach()
        for dim, wanted in dims.items():
            count = _image_size(leaf.shape[dim], sizes) if dim > 1 else sizes.get(leaf.shape[dim])
            if wanted is not None and count is not None:
                moved = moved.index_select(dim, torch.arange(count) % leaf.shape[dim])
        return moved.contiguous().requires_grad_(leaf.requires_grad)


def _image_size(size: int, sizes: dict[int, int]) -> int:
    return size + 4 * (sizes[2] - 2)


def _axes(name: str, leaf: Tensor) -> dict[int, Any]:
    axes: dict[int, Any] = {0: BATCH} if leaf.dim() and leaf.shape[0] == 2 and name not in FIXED else {}
    if name in SEQUENCES and leaf.dim() > 1 and leaf.shape[1] == 8:
        axes[1] = SEQUENCE
    if name in IMAGES and leaf.dim() == 4:
        axes |= {2: Dim.AUTO, 3: Dim.AUTO}
    return axes


def dynamic_case(row: ModelCase) -> Case:
    """A model with every batch dimension open, and lengths and image sizes where that is meaningful."""
    _, args, kwargs = row.make()
    leaves, spec = tree_flatten_with_path((args, kwargs))
    marked = [_axes(row.name, leaf) or None if isinstance(leaf, Tensor) else None for _, leaf in leaves]
    own_args, own_kwargs = tree_unflatten(marked, spec)
    shapes = _by_name(row, args, own_args) | dict(own_kwargs)
    return Case(row, shapes, (leaves, spec))


def _by_name(row: ModelCase, args: tuple[Any, ...], own: tuple[Any, ...]) -> dict[str, Any]:
    model, *_ = row.make()
    return dict(zip(inspect.signature(model.forward).parameters, own, strict=False))

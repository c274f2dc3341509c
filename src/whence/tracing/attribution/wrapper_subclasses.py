"""Tensors that are made of others, while a model runs: their gradients arrive in parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from whence._torch.autograd.nodes import GradientKey, gradient_key
from whence._torch.fakes import FakeTensor
from whence._torch.pytrees import TreeSpec, tree_flatten, whole_leaves
from whence._torch.subclasses.wrapper_subclasses import carries_gradients, is_composed, plain_parts
from whence.errors import Place, UnsupportedInput

COMPOSED = "nothing is replayed where tensors are made of others"
OPAQUE = "operations of tensors that are made of others"


@dataclass(frozen=True, eq=False)
class Composed:
    """A tensor that is made of others, in a run: the nodes of its plain parts, and what it is called."""

    tensor: Tensor
    nodes: tuple[fx.Node, ...]
    path: str


def keys_of_parts(value: Any) -> Iterator[tuple[Tensor, Tensor, GradientKey]]:
    """For every composed tensor in a value that needs a gradient: itself, each part, and the key of that."""
    for leaf in whole_leaves(value):
        if is_composed(leaf) and (key := gradient_key(leaf)) is not None:
            for number, (_, tensor) in enumerate(plain_parts(leaf)):
                if carries_gradients(tensor):
                    yield leaf, tensor, (*key, number)


def in_parts(
    keys: Sequence[GradientKey | None], gradients: Sequence[Tensor | None]
) -> tuple[tuple[GradientKey | None, ...], tuple[Tensor | None, ...]]:
    """Gradients with their keys; in the place of composed ones their parts, each with its own key."""
    if not any(map(is_composed, gradients)):
        return tuple(keys), tuple(gradients)
    found_keys: list[GradientKey | None] = []
    found: list[Tensor | None] = []
    known = [*keys, *[None] * (len(gradients) - len(keys))]
    for key, gradient in zip(known, gradients, strict=False):
        parts = [tensor for _, tensor in plain_parts(gradient)]
        several = is_composed(gradient)
        found += parts
        found_keys += [(*key, number) if key and several else key for number in range(len(parts))]
    return tuple(found_keys), tuple(found)


def root_by_part(root: Tensor, gradient: Tensor) -> Iterator[tuple[GradientKey | None, Tensor, Tensor]]:
    """What a backward begins with, and its gradient, part by part, each with the key of the part."""
    keys, seeds = in_parts([gradient_key(root)], [gradient])
    for key, (_, part), seed in zip(keys, plain_parts(root), seeds, strict=True):
        if seed is not None:
            yield key, part, seed


_REMEDY = "let both be of one class, turn requires_grad off for it, or capture the forward"


def gradient_parts(whole: Composed, gradient: Tensor | None) -> tuple[TreeSpec | None, list[Tensor | None]]:
    """The structure of the gradient of a composed tensor and its plain parts, one for each of the tensor's.

    Raises `UnsupportedInput` for a gradient that is made otherwise.
    """
    if gradient is None:
        return None, [None] * len(whole.nodes)
    leaves, spec = tree_flatten(gradient)
    if type(gradient) is not type(whole.tensor) or len(leaves) != len(whole.nodes):
        raise made_otherwise(whole.path, whole.tensor, gradient)
    return spec, leaves


def made_otherwise(name: str, tensor: Tensor, gradient: Any, remedy: str = _REMEDY) -> UnsupportedInput:
    """The error for a gradient that is not made of tensors as the one it is for."""
    kinds = ["plain tensor" if not is_composed(each) else type(each).__name__ for each in (tensor, gradient)]
    return UnsupportedInput(
        f"the gradient of {name}, a {kinds[0]}, is a {kinds[1]}",
        why="each input has one gradient in the program, a tensor like it",
        remedy=remedy,
    )


def _is_leaf_from_outside(tensor: Tensor) -> bool:
    """Whether a composed tensor has a gradient of its own; one that a view makes here has no history yet."""
    parts = (part for _, part in plain_parts(tensor))
    return tensor.is_leaf and tensor.requires_grad and not all(isinstance(p, FakeTensor) for p in parts)


def refuse_lost_gradient(tensor: Tensor, here: Callable[[], Place]) -> None:
    """A composed tensor from outside the model that requires a gradient: raises `UnsupportedInput`."""
    if not _is_leaf_from_outside(tensor):
        return
    raise UnsupportedInput(
        f"a {type(tensor).__name__} that requires a gradient is neither an input nor a parameter",
        where=here(),
        why="its gradient arrives at a tensor that is made of others, and the program has no name for that",
        remedy="register it as a parameter, pass it as an input, or detach it",
    )

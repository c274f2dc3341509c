"""Gradients that arrive in `.grad` while a backward runs, and not where it ends.

A reversible network computes its blocks again in the backward of an autograd function, and differentiates
them there with `torch.autograd.backward`: that accumulates the whole gradient of the blocks' parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from whence._torch.autograd.nodes import is_custom_function, nodes_below_tensors
from whence._torch.record.recorder import Recorder
from whence._torch.tensors import without_functions


class GradientsInside:
    """What arrives in `.grad` of tensors, beside what a backward gives for them."""

    def __init__(
        self, recorder: Recorder, tensors: Sequence[Tensor], before: Sequence[Tensor | None]
    ) -> None:
        self._recorder, self._tensors, self._before = recorder, tensors, before

    @property
    def has_gradients(self) -> bool:
        """Whether a tensor has one of before."""
        return any(gradient is not None for gradient in self._before)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block nothing is added to gradients of before."""
        held = [pair for pair in zip(self._tensors, self._before, strict=True) if pair[1] is not None]
        for tensor, _ in held:
            tensor.grad = None
        yield
        for tensor, gradient in held:
            if tensor.grad is None:
                tensor.grad = gradient

    def with_given(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """What the backward gave, and where that is nothing what has arrived.

        A tensor that has both keeps what arrived, which is then refused: nothing tells in which order eager
        mode adds them up.
        """
        rows = zip(self._tensors, self._before, given, strict=True)
        return tuple(
            self._taken(tensor, held) if gradient is None else gradient for tensor, held, gradient in rows
        )

    def _taken(self, tensor: Tensor, held: Tensor | None) -> Tensor | None:
        arrived = tensor.grad if tensor.is_leaf else None
        if arrived is None or arrived is held or self._recorder.node_of(arrived) is None:
            return None
        tensor.grad = held
        return arrived


@contextmanager
def gradients_inside(
    recorder: Recorder, roots: Sequence[Tensor], tensors: Sequence[Tensor]
) -> Iterator[GradientsInside]:
    """A backward runs in the block, which may call functions that accumulate gradients themselves."""
    with without_functions():
        before = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
    inside = GradientsInside(recorder, tensors, before)
    adds = inside.has_gradients and any(map(is_custom_function, nodes_below_tensors(roots)))
    with inside.alone() if adds else nullcontext():
        yield inside

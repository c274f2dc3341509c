"""From when to when the tensors of a run are held, by whoever: variables of Python hold some after their last
use."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, fx


class Lifetimes:
    """How many results there were when the tensor of a node was `made`, and when it was let go of."""

    def __init__(self) -> None:
        self.made: dict[fx.Node, int] = {}
        self.gone: dict[fx.Node, int] = {}
        self._references: list[Any] = []

    def follow(self, tensor: Tensor, node: fx.Node) -> None:
        """Note when it is let go of."""
        self.made[node] = len(self.made)
        self._references.append(ref(tensor, partial(_let_go, self.made, self.gone, node)))


def _let_go(made: Mapping[fx.Node, int], gone: dict[fx.Node, int], node: fx.Node, _reference: object) -> None:
    gone[node] = len(made) - 1

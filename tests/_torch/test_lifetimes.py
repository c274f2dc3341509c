"""How long the tensors of a run are held."""

from __future__ import annotations

import torch
from torch import fx

from whence._torch.lifetimes import Lifetimes


def test_when_a_tensor_is_let_go_of() -> None:
    """In results that there were then; views of it and what autograd saved are tensors of their own."""
    graph, lifetimes = fx.Graph(), Lifetimes()
    nodes = [graph.placeholder(name) for name in "abc"]
    tensors = [torch.ones(2, requires_grad=True) for _ in nodes]
    for tensor, node in zip(tensors, nodes, strict=True):
        lifetimes.follow(tensor, node)
    squared = tensors.pop(0).square().sum()
    assert [lifetimes.made[node] for node in nodes] == [0, 1, 2] and lifetimes.gone == {}
    del tensor, tensors
    assert lifetimes.gone == dict.fromkeys(nodes[1:], 2)
    del squared
    assert lifetimes.gone == dict.fromkeys(nodes, 2)

"""What the backward keeps is what eager saves, and the peak is what is alive at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.models import ModelCase, case

X = torch.randn(6, 4)


def saved_by_eager(found: ModelCase) -> int:
    """The bytes of all storages that autograd saves, without weights, buffers and inputs."""
    model, args, kwargs = found.make()
    held = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    own = {tensor.untyped_storage().data_ptr() for tensor in held if isinstance(tensor, Tensor)}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = found.loss(model(*args, **kwargs))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    assert loss.requires_grad
    return sum(size for place, size in storages.items() if place not in own)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["bert", "resnet", "llama", "gpt2", "vit"])
def test_kept_is_what_eager_saves(name: str) -> None:
    """Storages counted once, largest first."""
    found = case(name)
    model, args, kwargs = found.make()
    memory = whence.capture(model, args, kwargs, backward=found.loss).memory()
    assert memory.kept_bytes == saved_by_eager(found)
    assert list(memory.kept) == sorted(memory.kept, key=lambda row: (-row.bytes, row.node))


def test_producer_and_consumer_are_named() -> None:
    """With call and line; views of one storage are one row."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    memory = whence.capture(model, (X,), backward=lambda y: y.sum()).memory()
    (row,) = memory.kept
    assert (row.operation, row.call, row.bytes) == ("aten.relu.default", "1", 6 * 8 * 4)
    assert row.reads.startswith("aten.")
    assert whence.capture(model, (X,)).memory().kept == ()


def test_peak_of_a_chain() -> None:
    """Weights and input throughout, beside them a result and what it is made of."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Tanh())
    memory = whence.capture(model, (X,)).memory()
    weights, value = 4 * 4 * 4, 6 * 4 * 4
    assert memory.peak == weights + 3 * value
    assert sum(memory.parts.values()) == memory.peak
    assert memory.parts["parameters"] == weights and memory.parts["inputs"] == value
    assert [alive for _, alive in memory.timeline] == [weights + value * n for n in (1, 1, 2, 3, 3)]
    assert memory.to_dict()["peak"] == memory.peak


def test_parts_of_a_step() -> None:
    """State of the optimizer, gradients and weights are told apart."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    parts = program.memory().parts
    assert parts["parameters"] == 4 * (16 + 4)
    assert parts["optimizer state"] >= 2 * parts["parameters"]

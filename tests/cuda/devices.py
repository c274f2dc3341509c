"""The devices that rows run on: the CPU everywhere, and CUDA where it is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.architectures import ARCHITECTURES, Made
from whence._torch.pytrees import tree_flatten, tree_unflatten

on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_device)]
"""Each row of a device has its twin on the CPU."""


def moved(thing: Any, device: str) -> Any:
    """Tensors, wherever they are held, on a device."""
    leaves, spec = tree_flatten(thing)
    return tree_unflatten([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def made_on(device: str, name: str, *, training: bool | None = None) -> Made:
    """An architecture with its inputs there; the same numbers at every call."""
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    if training is not None:
        model.train(training)
    return model.to(device), moved(args, device), moved(kwargs, device)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add up in one order, or an error."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def first_tensor(result: Any) -> Tensor:
    """What a loss is made of."""
    if isinstance(result, Tensor):
        return result
    values = result.values() if hasattr(result, "values") else result
    return next(value for value in values if isinstance(value, Tensor))


def mean_sine(result: Any) -> Tensor:
    """A loss of any model."""
    return first_tensor(result).float().sin().mean()


def random_states(device: str) -> list[Tensor]:
    """Those of the CPU's generator and of the device's."""
    states = [torch.get_rng_state()]
    return states if device == "cpu" else [*states, torch.cuda.get_rng_state()]

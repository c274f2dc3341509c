"""Canaries: TorchScript's objects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.opaque_object import register_opaque_type

from tests.checks import verified
from tests.releases import OPAQUE, SCRIPT_IS_DEPRECATED, OpaqueBase
from whence._torch.observe.scripted import (
    is_packed_weight,
    is_script_object,
    is_scripted,
    object_among,
    takes_objects,
)


def traced() -> Any:
    with pytest.warns(SCRIPT_IS_DEPRECATED):
        return torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2), check_trace=False)


def traced_function() -> Any:
    with pytest.warns(SCRIPT_IS_DEPRECATED):
        return torch.jit.trace(torch.relu, torch.ones(1, 2), check_trace=False)


@pytest.mark.canary("torch._C.ScriptMethod")
@pytest.mark.parametrize(
    "make", [traced, lambda: traced().forward, traced_function], ids=["module", "method", "function"]
)
def test_scripted_things_are_told_apart(make: Callable[[], Any]) -> None:
    """A scripted module, its methods (`torch._C.ScriptMethod`) and a scripted function are known as such."""
    assert is_scripted(make())


@pytest.mark.parametrize("value", [nn.Linear(2, 2), nn.Linear(2, 2).forward, torch.relu, 3])
def test_other_things_are_not(value: object) -> None:
    """Ordinary modules, methods and functions are not scripted."""
    assert not is_scripted(value)


@pytest.mark.canary("torch.ScriptObject._type")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_weight_is_told_apart() -> None:
    """A packed quantised weight is a `ScriptObject` whose `_type` says so."""
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    assert is_packed_weight(torch.ops.quantized.linear_prepack(weight, None))
    assert not is_packed_weight(weight)


class Opaque(OpaqueBase):  # type: ignore[misc]
    """A class that is registered as one that nobody looks into."""


register_opaque_type(Opaque, typ=OPAQUE)


@pytest.mark.canary(
    "torch._library.opaque_object.is_opaque_reference_type",
    "torch._library.opaque_object.is_opaque_symbolic_type",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_objects_among_arguments_are_found() -> None:
    """Generators, script objects, opaque ones (`is_opaque_reference_type`), and who takes them."""
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    packed, opaque = torch.ops.quantized.linear_prepack(weight, None), Opaque()
    assert is_script_object(packed)
    assert object_among([weight, 3, packed]) is packed
    assert object_among([opaque]) is opaque
    assert object_among([weight, None, "text"]) is None
    assert takes_objects(torch.ops.quantized.linear_dynamic.default)
    assert takes_objects(torch.ops.aten.rand.generator)
    assert not takes_objects(torch.ops.aten.mm.default)


def test_regions_of_a_profiler_are_no_operations() -> None:
    """A region with a name in forward, and the one of an optimizer that runs there, leave nothing behind."""

    def fitted(x: Tensor) -> Tensor:
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with torch.profiler.record_function("fit"), torch.enable_grad():
            (weight.grad,) = torch.autograd.grad((weight - x).square().sum(), weight)
            optimizer.step()
        return weight.detach() * x

    program = verified(fitted, torch.ones(3))
    assert not [node for node in program.nodes() if "record_function" in str(node.target)]

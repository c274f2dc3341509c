"""Canaries: how lazy modules wait and are initialised."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from whence._torch.subclasses.lazy_modules import (
    initialised_for_real,
    is_waiting,
    uninitialised,
    without_numbers,
)


@pytest.mark.canary("torch.nn.Module._buffers", "torch.nn.modules.lazy.LazyModuleMixin._initialize_hook")
def test_waiting_module() -> None:
    """A lazy module waits until its first call, also when its parameters were loaded before."""
    module = nn.LazyLinear(3)
    assert is_waiting(module)
    assert uninitialised(module) == ["weight", "bias"]
    module.load_state_dict(nn.Linear(2, 3).state_dict())
    assert is_waiting(module)
    assert uninitialised(module) == []
    module(torch.ones(1, 2))
    assert not is_waiting(module)
    assert not is_waiting(nn.Linear(2, 3))


def test_parameters_are_real_after_a_call_on_fake_tensors() -> None:
    """The module's own hook (`_infer_parameters` in `_forward_pre_hooks`) runs outside of all modes."""
    done: list[nn.Module] = []
    module = nn.LazyLinear(3)
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True), initialised_for_real(module, done.append):
        module(torch.ones(4, 2))
    torch.manual_seed(0)
    expected = nn.LazyLinear(3)
    expected(torch.ones(4, 2))
    assert done == [module]
    assert type(module) is nn.Linear
    assert torch.equal(module.weight, expected.weight)
    assert not module._forward_pre_hooks


@pytest.mark.canary("torch.nn.Module._forward_pre_hooks")
def test_hook_is_given_back() -> None:
    """A lazy module that was not called keeps its own hook."""
    module = nn.LazyLinear(3)
    before = dict(module._forward_pre_hooks)
    with initialised_for_real(module, lambda _: None):
        assert dict(module._forward_pre_hooks) != before
    assert dict(module._forward_pre_hooks) == before


def test_refused_initialisation_is_undone() -> None:
    """When whoever is told afterwards refuses, the module is lazy again and can be initialised for real."""

    def refuse(module: nn.Module) -> None:
        raise RuntimeError("refused")

    module = nn.LazyBatchNorm1d()
    with (
        pytest.raises(RuntimeError, match="refused"),
        FakeTensorMode(allow_non_fake_inputs=True),
        initialised_for_real(module, refuse),
    ):
        module(torch.ones(4, 2))
    assert is_waiting(module)
    assert type(module) is nn.LazyBatchNorm1d
    assert uninitialised(module) == ["weight", "bias", "running_mean", "running_var"]
    module(torch.randn(4, 2))
    assert module.weight.shape == (2,)
    assert not module._forward_pre_hooks


def test_values_are_not_numbers() -> None:
    """What was computed from values of inputs is not a number; known tensors are not looked at."""
    module = nn.Linear(2, 2)
    assert without_numbers(module, set()) == []
    with torch.no_grad():
        module.bias.fill_(torch.nan)
    assert without_numbers(module, set()) == ["bias"]
    assert without_numbers(module, {id(module.bias)}) == []


def test_modes_are_left() -> None:
    """`_disable_current_modes` leaves every dispatch mode for a while."""
    with FakeTensorMode(), _disable_current_modes():
        assert type(torch.ones(2)) is torch.Tensor

"""Canaries: modules that wrap another, and how they are called."""

import pytest
import torch
from torch import Tensor, nn

from whence._torch.observe.hooks import has_own_hooks
from whence._torch.observe.wrappers import (
    call_through,
    inner_module,
    processes_averaged,
    seen_through,
    wrapper_chain,
)

X = torch.ones(2, 4)


def test_ordinary_module() -> None:
    """A module that wraps nothing is itself."""
    module = nn.Sequential(nn.Linear(4, 4))
    assert inner_module(module) is None
    assert seen_through(module) is module
    assert wrapper_chain(module) == ()
    assert processes_averaged(module) == 1


@pytest.mark.canary(
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    "torch.nn.Module._modules",
)
def test_compiled_module() -> None:
    """`OptimizedModule` of `torch._dynamo.eval_frame` keeps the original in `_modules` as `_orig_mod`."""
    module = nn.Linear(4, 4)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert inner_module(compiled) is module
    twice = nn.DataParallel(compiled)
    assert seen_through(twice) is module
    assert wrapper_chain(twice) == (twice, compiled)


def test_data_parallel_modules(group: None) -> None:
    """Both kinds of data parallelism keep the original as `module`."""
    module = nn.Linear(4, 4)
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert inner_module(wrapped) is module
    assert processes_averaged(wrapped) == 1


def test_call_through_runs_hooks_and_the_module_inside() -> None:
    """The wrapper's own forward does not run; its hooks do; afterwards it is as before."""

    class Wrapper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("not to be called")

    wrapper, module = Wrapper(), nn.Linear(4, 4)
    assert not has_own_hooks(wrapper)
    wrapper.register_forward_hook(lambda owner, args, output: output + 1)
    assert has_own_hooks(wrapper)
    before = dict(vars(wrapper))
    found = call_through(nn.Module.__call__, wrapper, module, (X,), {})
    assert torch.equal(found, module(X) + 1)
    assert vars(wrapper) == before

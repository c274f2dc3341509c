"""Operators that run functions are called as they are, by whichever way a release compiles them."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import utils

import whence
from whence._torch.observe.compile_flags import compiled_functions_run_eagerly
from whence._torch.versions.operator_calls import _prepared, operators_uncompiled


def halved(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y / 2, lambda y: y * 2, (x,))


def test_one_place_is_looked_at() -> None:
    """`torch.cond` asks for one of two names when it runs."""
    source = inspect.getsource(torch.cond)
    assert "_hop_compile_and_call" in source or "setup_compilation_env" in source


@pytest.mark.canary("torch._higher_order_ops.utils.setup_compilation_env")
def test_a_backend_is_none_where_one_was_prepared_for_each_call() -> None:
    """On this thread; the modes stay."""
    with _prepared(), utils.setup_compilation_env() as backend:
        assert backend == "eager"
    assert not utils._in_hop_compile()


@pytest.mark.canary("torch._higher_order_ops.utils._hop_compile_and_call")
def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator gives is what it gives in eager mode."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("compiled")

    assert torch.equal(halved(torch.ones(2)), torch.full((2,), 0.5))
    monkeypatch.setattr("torch._dynamo.convert_frame.compile_frame", refuse, raising=False)
    with compiled_functions_run_eagerly(), operators_uncompiled():
        assert torch.equal(halved(torch.ones(2)), torch.full((2,), 0.5))
    assert whence.capture(halved, (torch.ones(2),)).verify(halved, (torch.ones(2),)).ok

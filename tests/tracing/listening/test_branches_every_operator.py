"""Row 158: every operator that runs functions, as PyTorch lists them for its own tests."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_leaves

import whence

RECORDED = {"scan", "invoke_subgraph", "map", "cond"}
"""Those that are captured with their backwards; `while_loop` is without."""
REFUSED = {
    "invoke_quant": "WH116",
    "invoke_quant_packed": "WH116",
    "while_loop_stack_output": "WH116",
    "flex_attention_backward": "WH116",
    "local_map_hop": "WH116",
    "switch": "WH116",  # from PyTorch 2.15 on, as the next
    "flex_gemm": "WH116",
    "flex_attention": "WH102",  # the sample's mask is an argument, of a class that no one registered
}

ELSEWHERE = {
    "register_hook": "its hook is on an input, which a test of its own is about",
    "inline_asm_elementwise": "eager mode has no such kernel here",
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def named(info: Any) -> str:
    """The operator, and which of PyTorch's examples it is."""
    return f"{info.name}-{info.variant_test_name}"


class Running(nn.Module):
    """Runs a function on its arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def sample(info: Any, *, requires_grad: bool) -> tuple[Any, ...]:
    """The arguments of the first of PyTorch's own examples."""
    torch.manual_seed(0)
    found = next(iter(info.sample_inputs_func(info, "cpu", torch.float32, requires_grad=requires_grad)))
    return (found.input, *found.args)


@pytest.mark.sample(4)
@pytest.mark.parametrize("info", hop_db, ids=named)
def test_row_158_operator_is_recorded_or_refused(info: Any) -> None:
    """What eager runs is recorded and bitwise right, alone and in a tree, or refused by name."""
    model, args = Running(info.op), sample(info, requires_grad=False)
    if info.name in ELSEWHERE:
        pytest.skip(ELSEWHERE[info.name])
    expected = model(*deepcopy(args))  # some write to what they are given
    if info.name in REFUSED:
        with pytest.raises(whence.CaptureError, match=REFUSED[info.name]):
            whence.capture(model, args)
        return
    program = whence.capture(model, args)
    assert program.verify(model, args).ok
    found = program.unflatten()(*deepcopy(args))
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    operations = [node for node in program.nodes() if node.op == "call_function"]
    assert {str(program.where(node).quality) for node in operations} == {"exact"}


def differentiated() -> list[Any]:
    """Those that the program differentiates; functions within functions take seconds."""
    rows = [row for row in hop_db if row.name in RECORDED]
    nested = pytest.mark.sweep
    return [pytest.param(row, marks=nested if "nested" in row.variant_test_name else ()) for row in rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize("info", differentiated(), ids=named)
def test_row_158_operator_is_differentiated(info: Any) -> None:
    """Where PyTorch differentiates it, so does the program, bit for bit."""
    model, args = Running(info.op), sample(info, requires_grad=True)
    program = whence.capture(model, args, backward=True)
    assert program.verify(model, args).ok
    gradients = []
    for module in (model, program.unflatten()):
        given = [_leaf(value) for value in args]
        sum(leaf.sin().sum() for leaf in tree_leaves(module(*given))).backward()
        gradients.append([leaf.grad for leaf in tree_leaves(given)])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def _leaf(value: Any) -> Any:
    if isinstance(value, list):
        return [_leaf(item) for item in value]
    return value.detach().clone().requires_grad_() if isinstance(value, Tensor) else value


def test_row_158_hook_operator() -> None:
    """The operator that registers a hook does so: on an activation, not on an input."""
    (info,) = [row for row in hop_db if row.name == "register_hook"]
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(whence.errors.UnsupportedHook, match="is put on the input"):
        whence.capture(Running(info.op), (x,))
    model = Running(lambda x: info.op(x.sin()))
    assert whence.capture(model, (x,), backward=True).verify(model, (x,)).ok

"""Recorded nodes on real values: as eager computes them, and nothing outside changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from whence._torch.deciding.example_values import ABSENT, ExampleValues

aten = torch.ops.aten
OPTIONS: dict[str, Any] = {"device": torch.device("cpu"), "pin_memory": False}


def values(graph: fx.Graph, **held: object) -> ExampleValues:
    return ExampleValues(graph, nn.Module(), lambda node: held.get(node.name, ABSENT), {})


def test_writes_go_to_copies() -> None:
    """A write through one view is seen in the others, and not in the tensor that was given."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.select.int, (x, 0, 0))
    graph.call_function(aten.mul_.Tensor, (first, 10.0))
    total = graph.call_function(aten.sum.default, (x,))
    given = torch.ones(2, 2, requires_grad=True)
    assert values(graph, x=given).of(total).item() == 22.0
    assert torch.equal(given, torch.ones(2, 2)) and given._version == 0


def test_draws_are_eagers() -> None:
    """Also where some are asked for before others are recorded; the generator stays where it was."""
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    graph = fx.Graph()
    found = values(graph)
    before = torch.get_rng_state()
    for number in expected:
        node = graph.call_function(aten.rand.default, ([2],), OPTIONS)
        assert torch.equal(found.of(node), number)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_repeated_draw_is_the_first() -> None:
    """What a recomputation draws again."""
    graph = fx.Graph()
    first, again = (graph.call_function(aten.rand.default, ([2],), OPTIONS) for _ in range(2))
    found = ExampleValues(graph, nn.Module(), lambda _: ABSENT, {again: first})
    assert found.of(first) is found.of(again)


@pytest.mark.parametrize("given", [ABSENT, torch.ones(2, device="meta")])
def test_what_nobody_has_is_absent(given: object) -> None:
    """And so is all that follows from it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.default, (x,))
    assert values(graph, x=given).of(total) is ABSENT


@pytest.mark.canary("torch._dispatch.python.no_python_dispatcher")
def test_kernels_are_those_of_a_run() -> None:
    """Kernels in Python, which stand in where sizes vary, do not run."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.relu6.default, (x,))
    before = dict(aten.relu6.default.py_kernels)

    def refuse(_: Tensor) -> Tensor:
        raise AssertionError

    for key in (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CPU):
        aten.relu6.default.py_kernels[key] = refuse
    aten.relu6.default._dispatch_cache.clear()
    try:
        with enable_python_dispatcher():
            with pytest.raises(AssertionError):
                aten.relu6.default(torch.ones(2))
            assert values(graph, x=torch.full((2,), 9.0)).of(node).tolist() == [6.0, 6.0]
    finally:
        aten.relu6.default.py_kernels.clear()
        aten.relu6.default.py_kernels.update(before)
        aten.relu6.default._dispatch_cache.clear()

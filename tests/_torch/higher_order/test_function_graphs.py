"""What `whence._torch` relies on in PyTorch's operators that run functions."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops import utils
from torch.fx.experimental import proxy_tensor

from whence._torch.fakes import FakeTensorMode
from whence._torch.higher_order.function_graphs import (
    Played,
    functions_traced,
    is_of_transform,
    is_transformed,
    let_play,
    played,
    stop_playing,
)

OPERATORS = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention")


def test_rules_are_found_by_the_kind_of_mode() -> None:
    """Each operator has a rule for a recording in its `python_key_table`."""
    for name in OPERATORS:
        operator: Any = getattr(torch.ops.higher_order, name)
        assert callable(operator.python_key_table[proxy_tensor.ProxyTorchDispatchMode])


@pytest.mark.canary(
    "torch._higher_order_ops.flex_attention", "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER"
)
def test_rules_ask_for_the_tracer_at_work() -> None:
    """`reenter_make_fx` and `materialize_as_graph` read `_CURRENT_MAKE_FX_TRACER` when they are called."""
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
    for function in (utils.reenter_make_fx, utils._maybe_reenter_make_fx, utils.materialize_as_graph):
        assert "import _CURRENT_MAKE_FX_TRACER" in inspect.getsource(function)
    graph = fx.symbolic_trace(nn.Identity())
    with functions_traced(lambda _function, _args: graph, FakeTensorMode()):
        assert utils.reenter_make_fx(torch.sin)(torch.ones(1)) is graph
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None


def test_operators_are_compiled_through_one_function() -> None:
    """`torch.cond` asks for `_hop_compile_and_call` when it runs, and `_in_hop_compile` tells."""
    assert "import _hop_compile_and_call" in inspect.getsource(torch.cond)
    assert "_hop_compile_and_call(" in inspect.getsource(utils._maybe_compile_and_run_fn)
    assert not utils._in_hop_compile()
    regions = sys.modules["torch._higher_order_ops.invoke_subgraph"]
    assert "func(*args, **kwargs)" in inspect.getsource(regions.invoke_subgraph_placeholder)


def test_attention_indexes_by_a_function_of_its_own() -> None:
    """`TransformGetItemToIndex` and `ModIndex` are where flex attention keeps them."""
    module = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    assert issubclass(module.ModIndex, torch.autograd.Function)
    assert issubclass(module.TransformGetItemToIndex, torch.overrides.TorchFunctionMode)


@pytest.mark.canary("torch._C._functorch.is_functorch_wrapped_tensor")
def test_values_of_transforms_are_known() -> None:
    """`is_functorch_wrapped_tensor` tells the tensors that `torch.vmap` hands to a function."""
    seen: list[torch.Tensor] = []
    torch.vmap(lambda x: seen.append(x) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    assert torch._C._functorch.is_functorch_wrapped_tensor(seen[0])
    assert is_of_transform(seen[0])
    assert not is_of_transform(torch.ones(2))
    assert not is_of_transform(2)


@pytest.mark.canary("torch._C._functorch.peek_interpreter_stack")
def test_transforms_are_on_a_stack() -> None:
    """`peek_interpreter_stack` is None outside of `torch.vmap`."""
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not is_transformed()
    seen: list[bool] = []

    def looked_at(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed())
        return x

    torch.vmap(looked_at)(torch.ones(2))
    assert seen == [True]


def test_graph_says_which_node_runs_until_it_stops() -> None:
    """A graph that plays names its nodes in order, and is an ordinary one afterwards."""
    names: list[str] = []

    class Playing:
        def __init__(self, node: fx.Node) -> None:
            names.append(node.name)

        def __enter__(self) -> None:
            """A node begins."""

        def __exit__(self, *_: object) -> None:
            """It ends."""

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (graph.call_function(torch.cos, (x,)),)),))
    module = fx.GraphModule({}, graph)
    let_play(module, Playing)
    value = torch.ones(2)
    assert isinstance(played(module), Played)
    assert torch.equal(module(value)[0], value.cos().sin())
    assert names == ["cos", "sin"]
    stop_playing(module)
    assert played(module) is None
    assert torch.equal(module(value)[0], value.cos().sin())
    assert names == ["cos", "sin"]

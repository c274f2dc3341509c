"""Canaries: what we rely on in fx."""

import pytest
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from whence._torch.graphs import (
    NAMES_OF_CODE,
    Appender,
    fake_result,
    graph_module,
    name_exactly,
    nested_graph,
    own_copy,
    replacements_told,
    value_inputs,
)


def doubling() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
    return graph


def test_graph_module_is_an_ordinary_one() -> None:
    """The lazy kind is a graph module that runs, and prints its code."""
    module = graph_module({}, doubling(), "Doubling")
    assert isinstance(module, fx.GraphModule)
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    assert "mul" in module.code


@pytest.mark.canary("torch.fx._lazy_graph_module._LazyGraphModule")
def test_code_is_written_late() -> None:
    """Nothing is compiled before somebody runs or reads the module."""
    module = graph_module({}, doubling(), "Doubling")
    assert isinstance(module, _LazyGraphModule)
    assert module._needs_recompile()
    module(torch.ones(2))
    assert not module._needs_recompile()


def test_attributes_are_shared() -> None:
    """The tensors that a graph reads are the root's, not copies."""
    graph = fx.Graph()
    graph.output(graph.get_attr("layer.weight"))
    layer = nn.Linear(2, 2)
    module = graph_module({"layer.weight": layer.weight}, graph, "Reading")
    assert module.get_parameter("layer.weight") is layer.weight


def test_fx_renames_builtins() -> None:
    """Fx appends a number to a placeholder that is called like a builtin, which is why we name it plainly."""
    graph = fx.Graph()
    node = graph.create_node("placeholder", "input", name="input")
    assert node.name == "input_1"
    name_exactly(node, "input")
    assert (node.name, node.target) == ("input", "input")


def test_plain_name_runs() -> None:
    """A graph whose placeholder hides a builtin runs and prints."""
    graph = fx.Graph()
    node = graph.create_node("placeholder", "input", name="input")
    name_exactly(node, "input")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (node, 2)))
    graph.lint()
    assert torch.equal(graph_module({}, graph, "Plain")(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.canary("torch.fx.graph._custom_builtins")
@pytest.mark.parametrize("name", sorted(NAMES_OF_CODE))
def test_names_of_generated_code_stay_its_own(name: str) -> None:
    """A placeholder that is called as the code of fx calls PyTorch, or its module, has another name there."""
    graph = fx.Graph()
    node = graph.create_node("placeholder", name, name=name)
    name_exactly(node, name)
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (node, 2)))
    assert node.name == node.target and node.name.startswith(f"{name}_")
    assert torch.equal(graph_module({}, graph, "Plain")(torch.ones(2)), torch.full((2,), 2.0))


def test_taken_name_is_not_given_twice() -> None:
    """A name that another node has is left alone."""
    graph = fx.Graph()
    first, second = (graph.create_node("placeholder", "input", name="input") for _ in range(2))
    for node in (first, second):
        name_exactly(node, "input")
    assert first.name == "input"
    assert second.name != "input"


def test_nested_graphs_are_told_from_values() -> None:
    """The graph of a branch is read from the module that owns the graph, and is no value."""
    inner = fx.symbolic_trace(torch.nn.ReLU())
    graph = fx.Graph()
    value = graph.placeholder("x")
    branch = graph.get_attr("branch")
    used = graph.call_function(torch.cond, (value, branch))
    graph.output(used)
    assert nested_graph(branch) is None
    module = graph_module({"branch": inner}, graph, "Model")
    assert nested_graph(branch) is module.branch
    assert value_inputs(used) == [value]


@pytest.mark.canary(
    "torch.fx.GraphModule._register_replace_node_hook", "torch.fx.GraphModule._unregister_replace_node_hook"
)
def test_replacements_are_heard() -> None:
    """`_register_replace_node_hook` tells of uses that go over, until `_unregister_replace_node_hook`."""
    module = graph_module({}, doubling(), "Doubling")
    x, double, _ = module.graph.nodes
    heard: list[tuple[str, str]] = []
    with replacements_told(module, lambda old, new: heard.append((old.name, new))):
        with module.graph.inserting_after(double):
            negative = module.graph.call_function(torch.ops.aten.neg.default, (x,))
        double.replace_all_uses_with(negative)
        double.name = "twice"
    negative.replace_all_uses_with(x)
    assert heard == [("mul_tensor", "neg_default")]


def test_copy_has_nodes_of_its_own() -> None:
    """Names, operations and metadata agree, and nodes are others; a placeholder keeps a builtin's name."""
    graph = fx.Graph()
    name_exactly(graph.placeholder("input"), "input")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (next(iter(graph.nodes)), 2)))
    module = graph_module({}, graph, "Doubling")
    copied = own_copy(module)
    assert str(copied.graph) == str(module.graph)
    assert next(iter(copied.graph.nodes)).name == "input"
    assert not {*copied.graph.nodes} & {*module.graph.nodes}


def test_result_on_fakes() -> None:
    """An operation is evaluated on the values that its arguments are noted with."""
    x, double, _ = (graph := doubling()).nodes
    x.meta["val"] = torch.empty(3, device="meta")
    assert fake_result(double.target, double.args, double.kwargs).shape == (3,)
    assert graph is x.graph


@pytest.mark.canary("torch.fx.Graph._root")
def test_appended_nodes_are_those_of_a_graph() -> None:
    """A graph of appended nodes is in order, runs, finds its nodes, and gives no name twice."""
    graph = fx.Graph()
    append = Appender(graph)
    x = append("placeholder", "x", "x", (), {})
    double = append("call_function", "double", torch.ops.aten.mul.Tensor, (x, 2), {})
    append("output", "output", "output", (double,), {})
    graph.lint()
    assert [node.name for node in graph.nodes] == ["x", "double", "output"] and len(graph.nodes) == 3
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor) == [double]
    assert torch.equal(graph_module({}, graph, "Doubling")(torch.ones(2)), torch.full((2,), 2.0))
    with graph.inserting_after(double):
        assert graph.call_function(torch.ops.aten.neg.default, (double,), name="double").name == "double_1"

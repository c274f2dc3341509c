"""Passes that write in place, and gradients that are to stop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import whence
from whence.rewriting import CutGradients, Functionalize

aten = torch.ops.aten
X = torch.randn(3, 4)


class Layers(nn.Module):
    """An encoder that is called twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) + self.encoder(x * 2).sum()


class Doubling(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.encoder(x), self.encoder(x * 2)
        for hidden in (first, second):
            hidden[0].mul_(2)
        return self.head(first) + second.sum()


def in_place(module: fx.GraphModule) -> None:
    """Activations are written where they lie."""
    for node in module.graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.relu_.default


def _doubled(graph: fx.Graph, node: fx.Node, first: Callable[[fx.Node], fx.Node]) -> None:
    with graph.inserting_before(node.next):
        made = [view := first(node), graph.call_function(aten.mul_.Tensor, (view, 2))]
    for each in made:
        each.meta = {key: value for key, value in node.meta.items() if key != "val"} | each.meta


def writes_to_views(module: fx.GraphModule) -> None:
    """Doubles the first row of each activation through a view."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.relu.default:
            _doubled(graph, node, lambda held: graph.call_function(aten.select.int, (held, 0, 0)))


def writes_to_the_input(module: fx.GraphModule) -> None:
    """Doubles what the model was given."""
    graph = module.graph
    (given,) = (node for node in graph.nodes if node.name == "x")
    _doubled(graph, given, lambda held: held)


def test_in_place_operations_become_functional() -> None:
    """Origins are those of what was replaced, and the numbers eager's."""
    model = Layers()
    program = whence.capture(model, (X,))
    with pytest.raises(whence.LostProvenance, match="changes an input"):
        program.apply(in_place)
    changed = program.apply(Functionalize(in_place))
    assert changed.verify(model, (X,)).ok
    assert [entry.name for entry in changed.history] == ["functionalize"]
    activations = changed.select(":: aten.relu.default")
    assert [str(changed.where(node).calls[0]) for node in activations] == ["encoder.1", "encoder.1@1"]


def test_writes_through_views_are_followed() -> None:
    """What is written to a view is written to its base."""
    model, doubling = Layers(), Doubling()
    doubling.load_state_dict(model.state_dict())
    changed = whence.capture(model, (X,)).apply(Functionalize(writes_to_views))
    assert torch.equal(changed.module()(X), doubling(X))
    assert torch.equal(changed.unflatten()(X), doubling(X))


def test_a_write_to_an_input_is_refused() -> None:
    """The signature does not know of it."""
    program = whence.capture(Layers(), (X,))
    with pytest.raises(whence.errors.UnsupportedMutation, match="the input x is written"):
        program.apply(Functionalize(writes_to_the_input))


def nothing(module: fx.GraphModule) -> None:
    """A pass that changes nothing."""


def test_a_pass_without_writes_is_only_that_pass() -> None:
    """And what is no pass is refused as ever."""
    program = whence.capture(Layers(), (X,))
    assert program.apply(Functionalize(nothing)).diff(program).ok
    with pytest.raises(whence.UsageError, match="expected a pass"):
        program.apply(Functionalize(3))  # type: ignore[arg-type]


def test_gradients_stop_where_a_pattern_says() -> None:
    """The numbers are the same, and nothing chosen gets a gradient, in every call."""
    model = Layers()
    program = whence.capture(model, (X,)).apply(CutGradients("encoder.*"))
    assert torch.equal(program.module()(X), model(X))
    program.unflatten()(X).sum().backward()
    got = {name for name, held in model.named_parameters() if held.grad is not None}
    assert got == {"head.weight", "head.bias"}
    assert program.history[0].added == len(program.select(":: aten.detach.default"))


def test_gradients_of_a_joint_program_are_in_its_graph() -> None:
    """They are not cut there."""
    program = whence.capture(Layers(), (X,), backward=lambda out: out.sum())
    with pytest.raises(whence.UsageError, match="gradients in the graph"):
        program.apply(CutGradients("encoder"))

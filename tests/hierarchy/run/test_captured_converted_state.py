"""A tree looks at the dtype and the device of its state where it reads it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.randn(2, 4)


class Scaled(nn.Module):
    """Has a parameter, a buffer and a constant, and a cast that is part of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(ids.to(torch.float32)) * self.scale + torch.tensor(0.3)


IDS = torch.arange(8).reshape(2, 4)
MAKERS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "tree": lambda program, _: program.unflatten(copy=True),
    "flat": lambda program, _: program.module(copy=True),
    "onto": lambda program, model: program.unflatten(onto=model, copy=True),
}


def with_data(tree: nn.Module) -> None:
    """New tensors in the same parameters."""
    for held in tree.parameters():
        held.data = held.data.double()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda tree: tree.double(),
    "bfloat16": lambda tree: tree.bfloat16(),
    "meta": lambda tree: tree.to("meta"),
    "data": with_data,
    "assigned": lambda tree: tree.load_state_dict(_doubled(tree), assign=True),
    "one buffer": lambda tree: setattr(tree, "scale", torch.arange(4.0).half()),
}


def _doubled(tree: nn.Module) -> dict[str, Tensor]:
    return {name: held.double() for name, held in tree.state_dict().items()}


@pytest.mark.sample(10)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("backward", [False, True])
def test_other_state_is_refused_by_name(backward: bool, maker: str, move: str) -> None:
    """However state came to be of another dtype or on another device, the call is refused and names it."""
    model = Scaled()
    program = whence.capture(model, (IDS,), backward=backward)
    module = MAKERS[maker](program, model)
    MOVES[move](module)
    with pytest.raises(whence.CallError, match=r"(linear\.weight|scale) is torch.* was torch.float32 on cpu"):
        module(IDS)


def test_functional_call_is_refused() -> None:
    """Tensors of another dtype for one call are seen, too."""
    tree = whence.capture(Scaled(), (IDS,)).unflatten()
    with pytest.raises(whence.CallError, match=r"is torch\.float64 on cpu now"):
        torch.func.functional_call(tree, _doubled(tree), (IDS,))


def test_a_module_called_alone_names_its_state_from_the_root() -> None:
    """A submodule that was converted is refused under its own path, wherever the call began."""
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
    tree = whence.capture(model, (X,), backward=True).unflatten(copy=True)
    tree.get_submodule("1").double()
    for call in (tree, tree.get_submodule("1"), tree.get_submodule("1.0")):
        with pytest.raises(whence.CallError, match=r"1\.0\.weight is torch\.float64"):
            call(X)


def test_converted_between_forward_and_backward() -> None:
    """A backward that reads a weight refuses one that was converted since its forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    tree = whence.capture(model, (X,), backward=True).unflatten(copy=True)
    result, weight = tree(X), tree.get_parameter("1.weight")
    weight.data = weight.data.double()
    with pytest.raises(whence.CallError, match=r"1\.weight is torch\.float64"):
        result.sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_converted_back_it_runs(backward: bool) -> None:
    """What was converted and converted back, or moved within one kind of device, runs as before."""
    model = Scaled()
    tree = whence.capture(model, (IDS,), backward=backward).unflatten()
    expected = model(IDS)
    tree.double().float()
    tree.to("cpu:0")
    assert torch.equal(tree(IDS), expected)


def test_exported_programs_are_refused_as_pytorchs_own_tree_is() -> None:
    """The tree of an exported program looks at its state, too."""
    exported = torch.export.export(Scaled(), (IDS,))
    with pytest.raises(whence.CallError, match=r"(linear\.weight|scale) is torch\.float64"):
        whence.unflatten(exported).double()(IDS)


def test_bound_programs_without_guards_refuse() -> None:
    """A program that nobody watched looks at the state that it is bound to."""
    model = Scaled()
    program = whence.from_exported_program(torch.export.export(model, (IDS,)))
    bound, expected = program.bind(model), model(IDS)
    assert torch.equal(bound(IDS), expected)
    model.double()
    with pytest.raises(whence.StaleCapture, match=r"linear\.weight is torch\.float64 on cpu,"):
        bound(IDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_trees_refuse(whole: bool) -> None:
    """`torch.compile` reads the same look: it never compiles a graph over state of another dtype."""
    refuse_other_state(fullgraph=whole)


def test_compilers_that_have_given_up_refuse() -> None:
    """As eager mode does, and they warn of nothing that they read of ours."""
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for _ in range(4):
            refuse_other_state(fullgraph=False)


def refuse_other_state(*, fullgraph: bool) -> None:
    """A compiled tree refuses to run once its state is of another dtype."""
    tree = whence.capture(Scaled(), (IDS,)).unflatten(copy=True)
    compiled = torch.compile(tree, backend="eager", fullgraph=fullgraph)
    expected = tree(IDS)
    assert torch.equal(compiled(IDS), expected)
    tree.double()
    with pytest.raises((whence.CallError, torch._dynamo.exc.Unsupported)):
        compiled(IDS)


def test_traced_trees_are_read_without_the_look() -> None:
    """`torch.fx` puts no tensor where state is read, and its graph has no operation for the look."""
    tree = whence.capture(Scaled(), (IDS,)).unflatten()
    traced = torch.fx.symbolic_trace(tree)
    assert torch.equal(traced(IDS), tree(IDS))
    assert not [node for node in traced.graph.nodes if node.target is getattr]

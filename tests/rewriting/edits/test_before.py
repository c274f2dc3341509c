"""A graph that is traced anew inside a block keeps what is known of it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

import whence

X = torch.randn(2, 4)


class Model(nn.Module):
    """Two layers, of which the first runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.first(x).relu()).sin())
        return result


def _values(program: whence.Program) -> list[Any]:
    return [program.state.get(row.name, X) for row in program.signature.inputs]


def _places(program: whence.Program) -> list[Any]:
    origins = [program.where(node) for node in program.nodes() if node.op == "call_function"]
    return [(origin.calls, origin.phase, origin.quality, origin.source) for origin in origins]


def _made_anew(module: fx.GraphModule, values: list[Any]) -> fx.GraphModule:
    made: fx.GraphModule = make_fx(fx.Interpreter(module).run)(*values)
    return made


def _transformed(module: fx.GraphModule, _: list[Any]) -> fx.GraphModule:
    return fx.Transformer(module).transform()


@pytest.mark.parametrize("again", [_made_anew, _transformed])
@pytest.mark.parametrize("backward", [False, torch.sum])
def test_retraced_graph_keeps_origins(
    again: Callable[[fx.GraphModule, list[Any]], fx.GraphModule], backward: Any
) -> None:
    """With metadata preserved every operation comes from where it came, and the modules are as before."""
    model = Model()
    program = whence.capture(model, (X,), backward=backward)
    with program.track("again") as edit, preserve_node_meta():
        edit.graph_module = again(edit.graph_module, _values(program))
    program = edit.program
    calls = {str(program.where(node).calls[0]) for node in program.select("first :: :: forward")}
    assert calls == {"first", "first@1"}
    assert [row.name for row in program.signature.inputs] == [
        node.name for node in program.graph.find_nodes(op="placeholder")
    ]
    assert all("whence_before" not in str(node.meta.get("custom")) for node in program.graph.nodes)
    tree, outputs = program.unflatten(copy=True), model(X)
    torch.sum(outputs).backward()
    result = tree(X)
    loss = result[0] if backward else torch.sum(result)
    loss.backward()
    assert torch.equal(loss, torch.sum(outputs))
    for name, parameter in model.named_parameters():
        assert torch.equal(tree.get_parameter(name).grad, parameter.grad)  # type: ignore[arg-type]


def test_retraced_graph_without_metadata_is_told_how_to_keep_it() -> None:
    """Its inputs are known, its operations are not."""
    program = whence.capture(Model(), (X,))
    with (
        pytest.raises(whence.LostProvenance, match="preserve_node_meta") as found,
        program.track("again") as edit,
    ):
        edit.graph_module = _made_anew(edit.graph_module, _values(program))
    assert "is a new input" not in str(found.value)


@pytest.mark.parametrize("again", [_made_anew, _transformed])
def test_the_same_operations_are_known_without_metadata(
    again: Callable[[fx.GraphModule, list[Any]], fx.GraphModule],
) -> None:
    """What computes the same of the same is what it was; an input whose name fx changes is known, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))  # its argument is called `input`
    program = whence.capture(model, (X,), backward=torch.sum)
    before = _places(program)
    with program.track("again") as edit:
        edit.graph_module = again(edit.graph_module, [value.detach() for value in _values(program)])
    program = edit.program
    assert _places(program) == before
    assert program.verify(model, (X,)).ok
    program.unflatten()(X)[0].backward()


def test_other_operations_without_metadata_are_not_guessed() -> None:
    """Composites that a tracer takes apart would come from all modules at once."""
    program = whence.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (X,))
    with (
        pytest.raises(
            whence.LostProvenance, match=r"traced anew without its metadata(.|\n)*preserve_node_meta"
        ),
        program.track("again") as edit,
    ):
        edit.graph_module = _made_anew(edit.graph_module, _values(program))


class Stopped(nn.Module):
    """Gradients stop on one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).detach() + (x * self.scale).sin()


@pytest.mark.parametrize("keeps", [nullcontext, preserve_node_meta])
def test_gradients_stop_in_a_retraced_graph(keeps: Callable[[], Any]) -> None:
    """Where nothing is differentiated, some releases write `alias` for `detach`; gradients stop."""
    model = Stopped()
    program = whence.capture(model, (X,))
    with program.track("again") as edit, keeps():
        edit.graph_module = _made_anew(edit.graph_module, _values(program))
    program = edit.program
    assert program.verify(model, (X,)).ok
    assert program.select(":: aten.detach")


def test_annotations_are_as_before() -> None:
    """The mark among annotations is gone after the block, and theirs are there."""

    class Annotated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.fx.traceback.annotate({"stage": 1}):
                return x.sin()

    program = whence.capture(Annotated(), (X,))
    with program.track("again") as edit, preserve_node_meta():
        edit.graph_module = _made_anew(edit.graph_module, [X])
    program = edit.program
    (node,) = program.select(":: aten.sin")
    assert node.meta["custom"] == {"stage": 1}

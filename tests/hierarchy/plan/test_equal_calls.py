"""Equal calls share one body, and each still has what is its own."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import whence
from tests.behaviours.test_random_modules import SEARCH, made, run, total
from tests.checks import captured, differing
from tests.hierarchy.random_modules import Recipe, recipes
from tests.models import MODES, ModelCase, case, sampled_cases
from tests.program.small import Stack, sine_loss, stack_program
from whence.hierarchy.plan import facts as layout
from whence.hierarchy.plan.check import check
from whence.hierarchy.plan.plan import Body, Half, Plan
from whence.hierarchy.plan.planning import plan
from whence.schema import Phase


def planned_one_by_one(program: whence.Program) -> Plan:
    """The plan in which no call shares the body of another."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(layout, "first_equal_calls", lambda regions: tuple(range(len(regions.rows))))
        return plan(program)


def contents(body: Body | None) -> tuple[Any, ...] | None:
    """A body but for the order of what crosses its border."""
    if body is None:
        return None
    return (set(body.inputs), set(body.outputs), set(body.reads), body.steps, set(body.kept))


def check_same_plan(program: whence.Program) -> None:
    """Every call is planned as it is when it is planned by itself."""
    shared, alone = plan(program), planned_one_by_one(program)
    check(shared)
    assert list(shared.calls) == list(alone.calls)
    assert shared.flattened == alone.flattened
    for number, call in alone.calls.items():
        assert contents(shared.calls[number].forward) == contents(call.forward)
        assert contents(shared.calls[number].backward) == contents(call.backward)


@pytest.mark.sample(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", sampled_cases())
def test_plan_of_the_table_is_that_of_each_call_alone(row: ModelCase, mode: str) -> None:
    """For every model of the table, renaming a plan gives what planning would have given."""
    check_same_plan(captured(row.name, mode))


@pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])
@pytest.mark.random
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_plan_of_random_modules_is_that_of_each_call_alone(backward: Any, recipe: Recipe) -> None:
    """The same for random modules, with checkpoints."""
    model, x = made(recipe)
    check_same_plan(whence.capture(model, (x,), backward=backward))


class Twice(nn.Module):
    """Two equal modules around each other's results, so that random modules meet copies of themselves."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        results = []
        for part in self.parts:
            result = part(x)
            x = result[0] if isinstance(result, tuple) else result
            results.append(result)
        return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])
@pytest.mark.random
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_random_layers_share_and_are_eager(backward: Any, recipe: Recipe) -> None:
    """A stack of random modules has the plan of each alone, and its tree has eager's numbers."""
    torch.manual_seed(0)
    model, x = Twice(lambda: made(recipe)[0]), torch.randn(3, 4, requires_grad=True)
    program = whence.capture(deepcopy(model), (x,), backward=backward)
    check_same_plan(program)
    expected = run(model, x, returns_loss=False)
    assert differing(expected, run(program.unflatten(), x, returns_loss=callable(backward))) == []


def test_equal_modules_share_their_graphs() -> None:
    """All layers of Llama have one graph for each phase, and so have the modules in them."""
    tree: Any = captured("llama", "loss").unflatten()
    first, second = tree.model.layers
    assert first.forward_graph is second.forward_graph
    assert first.backward_graph is second.backward_graph
    assert first.mlp.down_proj.forward_graph is second.mlp.down_proj.forward_graph
    assert first.input_layernorm.backward_graph is second.post_attention_layernorm.backward_graph
    assert first.forward_graph is not first.self_attn.forward_graph


def test_graph_is_made_once() -> None:
    """A module's graph is the same object each time it is asked for."""
    tree: Any = stack_program().unflatten()
    assert tree.layers[0].forward_graph is tree.layers[0].forward_graph


def test_first_layer_that_differs_keeps_its_own_graph() -> None:
    """The first layer of a stack computes no gradient of its input, and shares nothing of that."""
    tree: Any = stack_program(sine_loss, depth=3).unflatten()
    first, second, third = tree.layers
    assert first.backward_graph is not second.backward_graph
    assert second.backward_graph is third.backward_graph


def test_equal_bodies_are_compiled_once() -> None:
    """Equal modules run the same function on their own state."""
    tree: Any = stack_program(depth=3).unflatten()
    functions = {layer.attention.calls[0].function(Half.FORWARD)[0] for layer in tree.layers}
    assert len(functions) == 1
    with torch.no_grad():
        tree.layers[1].attention.weight.zero_()
    x = torch.randn(3, 4)
    assert torch.equal(tree.layers[1].attention(x), torch.zeros(3, 4))
    assert not torch.equal(tree.layers[2].attention(x), torch.zeros(3, 4))


def test_error_names_the_module_it_is_about() -> None:
    """A replaced module in the third layer is named as such, whoever else shares the code around it."""
    tree: Any = stack_program(depth=3).unflatten()
    tree.layers[2].mlp = nn.Linear(5, 5)
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError) as caught:
        tree(x)
    assert "in the place of layers.2.mlp" in caught.value.__notes__[0]
    assert torch.equal(tree.layers[0](x), tree.layers[0](x))


def test_hooks_fire_on_the_module_they_are_on() -> None:
    """A hook on one of several equal modules sees its calls only."""
    program = stack_program(depth=3)
    tree: Any = program.unflatten()
    seen: list[Tensor] = []
    tree.layers[1].attention.register_forward_hook(lambda _module, args, _result: seen.append(args[0]))
    x = torch.randn(3, 4)
    tree(x)
    (given,) = seen
    assert torch.equal(given, tree.layers[0](x))


def test_each_module_is_called_alone_with_its_own_values() -> None:
    """A layer that was not planned itself runs and trains alone, with eager's numbers."""
    row = case("llama")
    model, args, kwargs = row.make()
    tree: Any = whence.capture(deepcopy(model), args, kwargs, backward=row.loss).unflatten()
    mine: Any = tree.model.layers[1].mlp
    theirs: Any = model.get_submodule("model.layers.1.mlp")
    x = torch.randn(2, 8, 32)
    results = []
    for module in (mine, theirs):
        given = x.clone().requires_grad_()
        result = module(given)
        result.sin().sum().backward()
        results.append({"result": result, "x": given.grad, "down": module.down_proj.weight.grad})
    assert differing(results[1], results[0]) == []


def test_calls_inside_a_shared_body_are_found_from_the_root() -> None:
    """Equal layers that call a module outside them share their code, and each finds it."""

    class Reaching(nn.Module):
        def __init__(self, outer: list[nn.Module]) -> None:
            super().__init__()
            self.outer, self.scale = outer, nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.outer[0](x * self.scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.layers = nn.ModuleList(Reaching([self.shared]) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Model(), torch.randn(2, 4, requires_grad=True)
    program = whence.capture(model, (x,), backward=True)
    assert [len(group) for group in program.layers()] == [3]
    tree: Any = program.unflatten()
    assert tree.layers[0].forward_graph is tree.layers[2].forward_graph
    assert torch.equal(tree(x), model(x))


def test_copies_of_a_tree_called_in_turns() -> None:
    """A call runs on the module that is there now: in each copy its own, and what was put back, again."""
    model: Any = Stack()
    x = torch.randn(3, 4)
    tree: Any = whence.capture(model, (x,)).unflatten()
    twin, other = deepcopy(tree), deepcopy(model)
    with torch.no_grad():
        for layer in (twin.layers[1].attention, other.layers[1].attention):
            layer.weight.add_(1)
    for _ in range(2):
        assert torch.equal(tree(x), model(x))
        assert torch.equal(twin(x), other(x))
    for first, second in ((tree, twin), (model, other)):
        one, two = first.layers[1].attention, second.layers[1].attention
        first.layers[1].attention, second.layers[1].attention = two, one
    assert torch.equal(tree(x), model(x))
    assert torch.equal(twin(x), other(x))


def test_body_of_another_size_is_found() -> None:
    """A call that holds more nodes than the body it shares runs is a fault of the plan."""
    planned = plan(stack_program(depth=3))
    number = next(n for n in planned.calls if str(planned.site(n)) == "layers.1.attention")
    regions = {**planned.regions, "another": (Phase.FORWARD, number)}
    with pytest.raises(
        whence.MalformedProgram, match=r"layers.1.attention \(forward\) holds 2 nodes, and runs 1"
    ):
        check(replace(planned, regions=regions))

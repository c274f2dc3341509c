"""Copies of programs, and what no copy can take to another process."""

import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import same_bits

X = torch.randn(2, 4)


class Block(nn.Module):
    """Its argument has the name of a builtin, and its statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, input: Tensor) -> Tensor:
        return input + torch.relu(self.norm(self.linear(input)))


def loss(result: Tensor) -> Tensor:
    """A scalar of the result."""
    return result.square().sum()


def deep(depth: int = 3) -> nn.Module:
    """Blocks one after the other."""
    return nn.Sequential(*(Block() for _ in range(depth)))


@pytest.mark.parametrize("state", ["inputs", "attributes"])
@pytest.mark.parametrize("backward", [False, True, loss])
def test_deep_copies_compute_the_same(backward: Any, state: str) -> None:
    """A deep copy is a program like the first, bit for bit, with graph, state and origins of its own."""
    model = deep()
    program = whence.capture(model, (X,), backward=backward, state=state)
    made = deepcopy(program)
    assert str(made) == str(program) and made.verify(model, (X,)).ok and made.check(model, (X,)) == []
    assert not {*made.graph.nodes} & {*program.graph.nodes}
    assert all(made.where(node.name) == program.where(node) for node in program.graph.nodes)
    before = {name: held.clone() for name, held in program.state.items()}
    made.unflatten()(X)
    with torch.no_grad():
        for held in made.state.values():
            held.zero_()
    assert all(same_bits(held, before[name]) for name, held in program.state.items())


def test_tied_parameters_stay_tied() -> None:
    """What was one tensor is one tensor in the copy, and a tree of it trains its tensors alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    tree = deepcopy(whence.capture(model, (X,), backward=loss)).unflatten()
    tree(X)[0].backward()
    assert tree.get_parameter("0.weight") is tree.get_parameter("1.weight")
    assert model[0].weight.grad is None and tree.get_parameter("0.weight").grad is not None


@pytest.mark.sweep
def test_deep_graphs() -> None:
    """A graph of thousands of nodes is copied without walking it by recursion."""
    model = deep(60)
    program = whence.capture(model, (X,), backward=loss)
    found, expected = deepcopy(program).unflatten()(X)[0], program.unflatten()(X)[0]
    assert torch.equal(found, expected)


def test_a_shallow_copy_is_edited_by_itself() -> None:
    """`copy.copy` shares graph and tensors until one of the two is edited."""
    program = whence.capture(deep(1), (X,))
    twin = copy(program)
    assert twin.state is program.state and twin.graph is program.graph
    with twin.track("nothing") as edit:
        edit.graph.lint()
    twin = edit.program
    assert twin.graph is not program.graph


def test_a_branch_is_copied() -> None:
    """Graphs inside the graph are copied with it."""

    def branching(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    program = whence.capture(branching, (X,))
    made = deepcopy(program)
    assert torch.equal(made.module()(X), branching(X)) and torch.equal(made.module()(-X), branching(-X))
    assert not {*made.nodes()} & {*program.nodes()}


def _step(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        value = loss(model(x))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def test_steps() -> None:
    """The copy of a step trains another model as the step does; a bound one is copied with what it trains."""
    model = deep()
    optimizer = torch.optim.Adam(model.parameters())
    program = whence.capture_step(_step(model, optimizer), (X,), model=model, optimizer=optimizer)
    other = deepcopy(model)
    bound = deepcopy(program).bind(other, torch.optim.Adam(other.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = deepcopy(bound)
    losses = [[run(X) for _ in range(3)] for run in (_step(model, optimizer), bound, third)]
    assert losses[0] == losses[1] == losses[2]
    trained: Any = third.model
    assert trained is not other
    assert all(map(same_bits, trained.state_dict().values(), model.state_dict().values()))


def test_guarded_copies_look_at_the_copied_model() -> None:
    """The deep copy of a guarded program checks and runs the copy of the model, not the model."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    duplicate: Any = deepcopy(whence.capture(model, (X,)).guarded(model))
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert torch.equal(duplicate(X), duplicate.model(X)) and not torch.equal(duplicate(X), model(X))
    duplicate.model.eval()
    with pytest.raises(whence.StaleCapture):
        duplicate(X)


def test_trees_of_the_users_classes_are_not_pickled() -> None:
    """Their `forward` would be the class's own in another process: that is said, and what to do."""
    model = deep(1)
    tree = whence.capture(model, (X,)).unflatten(onto=model)
    with pytest.raises(whence.CallError, match="cannot be pickled"):
        pickle.dumps(tree)
    assert torch.equal(deepcopy(tree)(X), tree(X))


@pytest.mark.parametrize("backward", [False, True])
def test_pickled_programs_and_trees_are_as_they_were(backward: bool) -> None:
    """`pickle` and `torch.save` take programs, trees and flat modules, with tensors of their own."""
    model = deep(1)
    program = whence.capture(model, (X,), backward=backward)
    for send in (lambda it: pickle.loads(pickle.dumps(it)), _through_torch):
        assert str(send(program)) == str(program)
        for tree in (program.unflatten(), program.module()):
            tree.register_forward_hook(_twice)
            again = send(tree)
            assert same_bits(again(X), tree(X)) and inspect.signature(again) == inspect.signature(
                model.forward
            )
            assert list(again.state_dict()) == list(model.state_dict())
            again(X).sum().backward()
            assert all(parameter.grad is not None for parameter in again.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def _twice(_module: nn.Module, _args: object, result: Tensor) -> Tensor:
    return 2 * result


def _through_torch(it: Any) -> Any:
    held = io.BytesIO()
    torch.save(it, held)
    held.seek(0)
    return torch.load(held, weights_only=False)

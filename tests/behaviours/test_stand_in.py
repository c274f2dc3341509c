"""A tree in the place of what `torch.export.unflatten` gives: interpreted, with others' modules in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import FlatArgsAdapter, export

import whence
from tests.models import MODEL_CASES, ModelCase
from whence._torch.pytrees import tree_flatten

X = torch.randn(2, 4)
Reader = Callable[[nn.Module], Any]
READERS: dict[str, Reader] = {
    "captured": lambda model: whence.capture(model, (X,)).unflatten(),
    "exported": lambda model: whence.unflatten(export(model, (X,))),
    "preserved": lambda model: whence.capture(model, (X,), preserve_calls=["*"]).unflatten(),
}
EACH = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
UNPRESERVED = pytest.mark.parametrize(
    "read", [READERS["captured"], READERS["exported"]], ids=["own", "export"]
)


class Block(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.linear(x) + self.shift
        return shifted


class Blocks(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu())
        return result


class Twice(nn.Module):
    """One of them, called twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(self.block(x).relu())
        return result


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


class Ignoring(nn.Module):
    """Takes what it does not read."""

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        return x.sin()


class Around(nn.Module):
    """Hands on what is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Ignoring()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x, x.cos())
        return result


class Tied(nn.Module):
    """Reads the weight of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) @ self.linear.weight
        return result


MISFITS: list[Callable[[Any], object]] = [
    lambda tree: tree(X, X),
    lambda tree: tree(),
    lambda tree: tree(y=X),
    lambda tree: tree(torch.ones(3, 5)),
    lambda tree: tree((X,)),
    lambda tree: tree.first(X, X),
    lambda tree: tree.first.linear(1),
]


@EACH
@pytest.mark.parametrize("call", MISFITS, ids=range(len(MISFITS)))
def test_calls_that_do_not_fit_are_type_errors(read: Reader, call: Callable[[Any], object]) -> None:
    """As Python's and PyTorch's are, for the tree and what is in it."""
    with pytest.raises(TypeError) as found:
        call(read(Blocks()))
    assert isinstance(found.value, whence.CallError)


class Adapter(FlatArgsAdapter):
    """Gives too many."""

    def adapt(
        self,
        target_spec: Any,
        input_spec: Any,
        input_args: list[Any],
        metadata: dict[str, Any] | None = None,
        obj: Any = None,
    ) -> list[Any]:
        return [*input_args, *input_args]


def test_adapted_arguments_of_another_number_are_a_type_error() -> None:
    """What an adapter gives is compared as well."""
    with pytest.raises(TypeError):
        whence.unflatten(export(Blocks(), (X,)), Adapter())((X, X))


def _nodes(tree: nn.Module) -> list[fx.Node]:
    graphs = [graph for module in tree.modules() if (graph := getattr(module, "forward_graph", None))]
    return [node for graph in graphs for node in graph.nodes if node.op != "output"]


@pytest.mark.parametrize("backward", [False, True])
def test_every_node_of_a_tree_has_its_value(backward: bool) -> None:
    """Calls of modules give tuples of values, and what they keep for a backward is one, too."""
    tree = whence.capture(Blocks(), (X,), backward=backward).unflatten()
    assert [node for node in _nodes(tree) if "val" not in node.meta] == []
    call = next(node for node in _nodes(tree) if node.op == "call_module")
    assert call.meta["val"][0].shape == X.shape
    assert len(call.meta["val"]) == 1 + backward


def _interpreted(tree: Any, args: Any, kwargs: Any) -> list[Any]:
    flat = tree.calls[0].interface.convention.flatten(args, kwargs or {})
    return list(fx.Interpreter(tree).run(*flat))


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", MODEL_CASES[::8], ids=lambda row: row.name)
@pytest.mark.parametrize("is_joint", [False, True])
def test_interpreter_runs_a_tree(row: ModelCase, is_joint: bool) -> None:
    """On flat arguments, it returns the flat results, loss first, and then what the tree would write."""
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs, backward=row.loss if is_joint else False)
    torch.manual_seed(0)
    found = _interpreted(program.unflatten(copy=True), args, kwargs)
    torch.manual_seed(0)
    expected = tree_flatten(program.unflatten(copy=True)(*args, **(kwargs or {})))[0]
    tensors = [value for value in expected if isinstance(value, Tensor)]
    assert all(map(torch.equal, tensors, found))


@EACH
def test_interpreter_runs_what_is_in_a_tree(read: Reader) -> None:
    """Modules inside, with others' modules among them, and the flat module."""
    model = Blocks()
    tree = read(model)
    flat = whence.capture(model, (X,)).module()
    for each in (tree, flat):
        assert torch.equal(fx.Interpreter(each).run(X)[0], model(X))
    assert torch.equal(fx.Interpreter(tree.first).run(X)[0], model.first(X))
    assert torch.equal(fx.Interpreter(tree.first.linear).run(X)[0], model.first.linear(X))
    tree.first = model.first = nn.Linear(4, 4)  # type: ignore[assignment]
    assert torch.equal(fx.Interpreter(tree).run(X)[0], model(X))


def test_interpreter_takes_arguments_in_their_order() -> None:
    """Not in the order in which they are read, and those that are not read, too; branches are run."""

    class Model(nn.Module):
        def forward(self, a: Tensor, unused: Tensor, b: Tensor) -> Tensor:
            branch = torch.cond(b.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (a,))
            return b - branch

    args = (X, X, X * 2)
    tree = whence.capture(Model(), args).unflatten()
    assert torch.equal(fx.Interpreter(tree).run(*args)[0], Model()(*args))


def test_module_without_a_call_has_no_graph() -> None:
    """Whatever a tree lacks is told of with the way to have it."""
    tree: Any = whence.capture(Blocks(), (X,)).unflatten()
    with pytest.raises(AttributeError, match="in_features") as found:
        _ = tree.first.linear.in_features
    assert "unflatten(onto=model)" in found.value.__notes__[0]
    assert not hasattr(tree.first, "weight")


@pytest.mark.sample(1)
@UNPRESERVED
def test_unpreserved_module_is_replaced(read: Reader) -> None:
    """By attribute or by `set_submodule`, also inside of another, where all it takes and gives gets there."""
    model, new = Blocks(), nn.Linear(4, 4)
    tree = read(model)
    tree.set_submodule("first.linear", new)
    model.first.linear = new
    assert torch.equal(tree(X), model(X))
    tree.second = model.second = Block()
    assert torch.equal(tree(X), model(X))
    tree(X).sum().backward()
    assert new.weight.grad is not None and model.second.linear.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(torch.compile(tree, backend="eager")(X), model(X))


@UNPRESERVED
def test_unpreserved_module_is_replaced_for_all_its_calls(read: Reader) -> None:
    """A module that is called twice is one."""
    model = Twice(Block())
    tree = read(model)
    tree.block = model.block = nn.Linear(4, 4)
    assert torch.equal(tree(X), model(X))


@pytest.mark.sample(1)
@EACH
def test_one_of_several_calls_is_replaced(read: Reader) -> None:
    """`block@1` is the second call of `block`: a module of that name runs in its place alone."""
    model, new = Twice(Block()), nn.Linear(4, 4)
    tree = read(model)
    tree.set_submodule("block@1", new)
    assert torch.equal(tree(X), new(model.block(X).relu()))
    with torch.no_grad():
        assert torch.equal(torch.compile(tree, backend="eager")(X), tree(X))


REFUSED: list[tuple[Callable[[], nn.Module], str, str]] = [
    (Around, "inner", r"its argument args\[1\] is no value of the program"),
    (Tied, "linear", "linear was replaced by a Identity, and the graph around it reads weight of it"),
    (lambda: Twice(Counting()), "block@1", "it writes state, which the other calls"),
]


@pytest.mark.parametrize(("make", "name", "told"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_be_replaced_is_refused_by_name(
    make: Callable[[], nn.Module], name: str, told: str
) -> None:
    """Where a border lacks something, or state is meant that is gone, the call says which and why."""
    tree = whence.capture(make(), (X,)).unflatten()
    tree.set_submodule(name, nn.Identity())
    with pytest.raises(whence.CallError, match=told):
        tree(X)


def test_refusal_names_the_whole_path_to_preserve() -> None:
    """With what it says the replacement works: in a joint tree modules have to be preserved."""
    model, new = Blocks(), nn.Linear(4, 4)
    tree = whence.capture(model, (X,), backward=True).unflatten()
    tree.set_submodule("first.linear", new)
    with pytest.raises(whence.CallError, match=r"preserve_calls=\['first.linear'\]"):
        tree(X)
    kept = whence.capture(model, (X,), backward=True, preserve_calls=["first.linear"]).unflatten()
    kept.set_submodule("first.linear", new)
    model.first.linear = new
    assert torch.equal(kept(X), model(X))


@pytest.mark.parametrize("name", ["block@7", "nothing@1"])
def test_call_that_was_not_made_cannot_be_replaced(name: str) -> None:
    """A module under the name of no call would run nowhere."""
    tree = whence.capture(Twice(Block()), (X,)).unflatten()
    with pytest.raises(whence.CallError, match=name):
        setattr(tree, name, nn.Identity())
    with pytest.raises(whence.CallError, match=name):
        tree.add_module(name, nn.Identity())

"""The tree of an exported program has the model's shape: rows 106 to 122 of what PyTorch pins down."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.interop.helpers import (
    BOTH_FRONTS,
    EVERY_WAY,
    exported,
    is_eager,
    loaded,
    program_of,
    tree_of,
    unflattened,
)

X = torch.arange(8.0).reshape(2, 4)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Branch(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf()
        self.second = Leaf()
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) * self.scale + self.second(y)


class Whole(nn.Module):
    """Registered in another order than called; reads a child's buffer; skips a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.last = Branch()
        self.holder: Any = nn.Module()
        self.holder.inner = Leaf()
        self.first = Branch()
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.nothing(self.first(x, x * 2))
        y = self.holder.inner(y) + self.last.scale
        return self.last(y, x)


def whole() -> Any:
    torch.manual_seed(0)
    return Whole()


@EVERY_WAY
def test_row_106_submodules_work_alone(way: str) -> None:
    """Every submodule that was called is callable alone, with eager's results."""
    model = whole()
    tree = tree_of(model, (X,), way=way)
    assert torch.equal(tree.first(X, X + 1), model.first(X, X + 1))
    assert torch.equal(tree.last.second(X), model.last.second(X))
    assert torch.equal(tree.holder.inner.linear(X), model.holder.inner.linear(X))


@EVERY_WAY
def test_rows_107_108_child_state_and_grandchildren(way: str) -> None:
    """A parent reads its child's buffer, and calls a grandchild without its parent."""
    program = program_of(whole(), (X,), way=way)
    assert [str(call) for call in program.calls][5:8] == [
        "first.second.linear: Linear",
        "holder.inner: Leaf",
        "holder.inner.linear: Linear",
    ]
    scale = program.node(program.input("last.scale").name)
    assert [program.call_of(user).label for user in scale.users] == ["(root)", "last"]


@EVERY_WAY
def test_row_109_order_of_modules(way: str) -> None:
    """named_modules and state_dict are in eager's order, with what was never called."""
    model = whole()
    tree = tree_of(model, (X,), way=way)
    assert [name for name, _ in tree.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(tree.state_dict()) == list(model.state_dict())


@BOTH_FRONTS
def test_rows_110_111_graphs(way: str) -> None:
    """In each graph placeholders come first, and each node has a value."""
    tree = tree_of(whole(), (X,), way=way)
    graph = tree.last.first.linear.forward_graph
    assert graph is not None
    assert [node.op for node in graph.nodes] == [
        "placeholder",
        "get_attr",
        "get_attr",
        "call_function",
        "output",
    ]
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")


@EVERY_WAY
def test_row_112_frozen_parameters(way: str) -> None:
    """A parameter that needs no gradient needs none in the tree."""
    model = whole()
    model.last.first.linear.weight.requires_grad_(False)
    tree = tree_of(model, (X,), way=way)
    assert [p.requires_grad for p in tree.parameters()] == [p.requires_grad for p in model.parameters()]


def test_row_112_meta_device() -> None:
    """A model on the meta device stays there."""
    with torch.device("meta"):
        model = whole()
    tree = unflattened(exported(model, (X.to("meta"),)))
    assert {p.device.type for p in tree.parameters()} == {"meta"}
    assert tree(X.to("meta")).shape == (2, 4)


@EVERY_WAY
def test_row_113_classes(way: str) -> None:
    """The tree says the eager class of the root and of all that was called."""
    tree = tree_of(whole(), (X,), way=way)
    assert (tree.type_name, tree.last.type_name, tree.last.first.linear.type_name) == (
        "Whole",
        "Branch",
        "Linear",
    )


def test_row_117_exported_again() -> None:
    """A tree exports again, and is the same model then."""
    model = whole()
    tree = tree_of(model, (X,))
    again = unflattened(exported(tree, (X,)))
    is_eager(again, model, (X,))


def test_row_95_a_tree_is_captured_again() -> None:
    """A tree of an exported program is captured by whence, with the calls it makes."""
    model = whole()
    tree = tree_of(model, (X,))
    program = whence.capture(tree, (X,))
    assert [str(call.site) for call in program.calls] == [
        str(call.site) for call in whence.capture(model, (X,)).calls if call.site.path != ("nothing",)
    ]


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.frozen = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.frozen(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.leaf(x + y)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region = Region()

    def forward(self, x: Tensor) -> Tensor:
        return self.region(x).float()


@pytest.mark.sample(2)
@EVERY_WAY
def test_rows_118_156_defect_9_regions_are_no_wrappers(way: str) -> None:
    """Operations under no_grad and autocast are in the graph of the module that made them."""
    torch.manual_seed(0)
    program = program_of(Holder(), (X,), way=way, preserved=("region.frozen",))
    inner = (
        "region" if way == "decomposed" else "region.leaf.linear"
    )  # run_decompositions forgets what was inside
    assert program.select(f"{inner} :: aten._to_copy")
    assert not [node for node in program.nodes() if "wrap_with" in str(node.target)]
    torch.manual_seed(0)
    model = Holder()
    tree = tree_of(model, (X,), way=way, preserved=("region.frozen",))
    if way != "decomposed":
        assert torch.equal(tree.region.frozen(X), model.region.frozen(X))


@pytest.mark.parametrize("way", ["non-strict", "strict", "loaded"])
def test_row_118_gradients_stop_where_eager_stops_them(way: str) -> None:
    """What ran under no_grad gets no gradient, and the rest gets eager's."""
    torch.manual_seed(0)
    model = Holder()
    tree = tree_of(model, (X,), way=way)
    tree(X).sum().backward()
    model(X).sum().backward()
    assert tree.region.frozen.linear.weight.grad is None
    assert torch.equal(tree.region.leaf.linear.weight.grad, model.region.leaf.linear.weight.grad)  # type: ignore[arg-type]


class MakesModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.Softmax(dim=-1)(x @ self.weight)


@EVERY_WAY
def test_rows_40_121_module_made_in_forward(way: str) -> None:
    """A module made in forward is part of its caller."""
    tree = tree_of(MakesModule(), (X,), way=way)
    assert [name for name, _ in tree.named_modules()] == [""]


class Sliced(nn.Module):
    """Slices of a list and of a sequence, called and iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.chained = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        self.walked = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.listed[1:4]:
            x = module(x)
        for module in self.listed[::2]:
            x = module(x)
        walked: Any = self.walked[2:]
        for module in walked:
            x = module(x)
        return self.chained[1:3](x)


@pytest.mark.sample(2)
@EVERY_WAY
def test_rows_38_89_slices(way: str) -> None:
    """A member of a slice is known by its own name, whatever the front end calls it."""
    torch.manual_seed(0)
    program = program_of(Sliced(), (X,), way=way)
    called = [str(call.site) for call in program.calls if call.site.type == "Linear"]
    listed = ["listed.1", "listed.2", "listed.3", "listed.0", "listed.2@1", "listed.4"]
    assert called == [*listed, "walked.2", "walked.3", "walked.4", "chained.1", "chained.2"]
    tree = tree_of(Sliced(), (X,), way=way)
    assert len(tree.listed) == 5


@pytest.mark.sample(2)
@EVERY_WAY
def test_defect_12_lists_and_modes(way: str) -> None:
    """A list has a length and is a list; a model exported in eval is in eval."""
    model = nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4)})["a"], nn.Dropout(0.5)).eval()
    tree = tree_of(model, (X,), way=way)
    assert len(tree) == 2
    if way != "decomposed":  # where a dropout that is off has gone
        assert not tree[1].training
    torch.manual_seed(0)
    assert isinstance(tree_of(Sliced(), (X,), way=way).listed, nn.ModuleList)


@pytest.mark.sample(2)
@EVERY_WAY
def test_defect_11_copied_and_pickled(way: str) -> None:
    """A tree is copied, and its copy trains on its own; pickled, it comes back as it is."""
    model = whole()
    tree = tree_of(model, (X,), way=way)
    copied = copy.deepcopy(tree)
    with torch.no_grad():
        copied.last.scale.zero_()
    is_eager(tree, model, (X,))
    assert not torch.equal(copied(X), tree(X))
    joint = whence.capture(model, (X,), backward=True).unflatten()
    for each in (tree, copied, joint):
        again = pickle.loads(pickle.dumps(each))
        assert torch.equal(again(X), each(X)) and list(again.state_dict()) == list(each.state_dict())


def test_tree_trains_as_eager() -> None:
    """Three steps of gradient descent leave eager's parameters."""
    model = whole()
    tree = tree_of(model, (X,))
    for module in (model, tree):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(X).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tree.parameters(), strict=True))


def test_unflatten_copies_and_from_exported_program_shares() -> None:
    """`unflatten` copies the state as PyTorch does; a program shares the exported program's."""
    program = exported(whole(), (X,))
    tree, shared = unflattened(program), whence.from_exported_program(program)
    weight = program.state_dict["last.first.linear.weight"]
    assert tree.last.first.linear.weight is not weight
    assert unflattened(shared).last.first.linear.weight is weight


def test_a_tree_can_be_saved_by_its_state() -> None:
    """The state dict of a tree survives pickling and loads into the eager model, strictly."""
    model = whole()
    tree = tree_of(model, (X,))
    model.load_state_dict(pickle.loads(pickle.dumps(tree.state_dict())))


def test_the_exported_program_is_left_alone() -> None:
    """Reading an exported program changes nothing about it: not its graphs, its metadata or its state."""
    program = exported(Holder(), (X,))
    before = (
        str(program),
        [dict(node.meta) for node in program.graph.nodes],
        copy.deepcopy(program.state_dict),
    )
    unflattened(program)(X)
    assert str(program) == before[0]
    assert [list(node.meta) for node in program.graph.nodes] == [list(meta) for meta in before[1]]
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in program.state_dict.items())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(self.leaf(x))


def test_defect_14_hooks_see_every_call() -> None:
    """A forward hook on a module that is called twice sees both calls, once each."""
    tree, seen = tree_of(Twice(), (X,)), list[Tensor]()
    tree.leaf.register_forward_hook(lambda _module, _args, result: seen.append(result))
    result = tree(X)
    assert len(seen) == 2
    assert torch.equal(seen[1], result)


class Scaling(nn.Module):
    """Holds a constant that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.filterwarnings("ignore:A model attribute `scale` requires gradient")
def test_loaded_constant_that_requires_grad() -> None:
    """Loading computes it, and `copy.deepcopy` refuses what was computed; copies begin anew."""
    x = torch.randn(2, 4)
    program = loaded(torch.export.export(Scaling(), (x,)))
    assert not program.constants["scale"].is_leaf
    expected = program.module()(x)
    read = whence.from_exported_program(program)
    tree = read.unflatten()
    for run in (
        whence.unflatten(program),
        tree,
        read.unflatten(copy=True),
        copy.deepcopy(tree),
        copy.deepcopy(read).module(),
        copy.deepcopy(read.module()),
        read.to_exported_program().module(),
        whence.capture(program.module(), (x,)).module(),
    ):
        assert torch.equal(run(x), expected)
        run(x).sum().backward()
    assert copy.deepcopy(tree).scale.is_leaf

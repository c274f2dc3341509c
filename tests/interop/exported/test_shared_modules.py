"""Repeated, shared and tied modules of exported programs: rows 46 to 48 and 133 to 148."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.interop.helpers import BOTH_FRONTS, EVERY_WAY, exported, is_eager, program_of, tree_of, unflattened

X = torch.arange(8.0).reshape(2, 4)


class Switch(nn.Module):
    """Does one of two things, by a Python argument, and one thing only without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: Tensor, down: bool = False, extra: Tensor | None = None) -> Tensor:
        x = self.down(x) if down else self.up(x)
        return x if extra is None else x + extra


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = Switch()
        self.n2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x = self.n(self.n2(x), True)
        return self.n(self.n(x), extra=x)


def seeded(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()


@EVERY_WAY
def test_rows_46_133_137_defects_3_5_specialised_calls(way: str) -> None:
    """Calls that do different things are told apart; a stray call of a submodule changes nothing."""
    model = seeded(Switched)
    tree = tree_of(model, (X,), way=way)
    assert [call.name for call in tree.n.calls] == ["n", "n@1", "n@2", "n@3"]
    tree.n(X)
    tree.n2(X)
    is_eager(tree, model, (X,))
    assert list(tree.state_dict()) == list(model.state_dict())


@EVERY_WAY
def test_defects_3_4_loading_changes_every_call(way: str) -> None:
    """Loading a state dict, also with assign=True, or setting a parameter, changes every call of a module."""
    model, other = seeded(Switched), Switched()
    tree = tree_of(model, (X,), way=way)
    tree.load_state_dict(other.state_dict(), assign=True)
    is_eager(tree, other, (X,))
    for module in (tree, other):
        module.n.up.weight = nn.Parameter(torch.eye(4))
    is_eager(tree, other, (X,))


class Nested(nn.Module):
    """Back-to-back calls, and calls of an inner module before and after its parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.k[0](self.k(self.k(self.k[0](x))))


@EVERY_WAY
def test_row_135_back_to_back(way: str) -> None:
    """Calls in a row are as many calls, and an inner module is called before and after its parent."""
    program = program_of(seeded(Nested), (X,), way=way)
    sites = [str(call.site) for call in program.calls if call.site.path]
    expected = ["k.0", "k", "k.0@1", "k.1", "k@1", "k.0@2", "k.1@1", "k.0@3"]
    assert sites == expected
    tree_of(seeded(Nested), (X,), way=way)


def test_row_47_gaps_in_the_numbers_of_calls() -> None:
    """A call whose neighbours have gone keeps its number and its parameters."""
    program = exported(seeded(Nested), (X,))
    first = next(node for node in program.graph.nodes if node.op == "call_function")
    program.graph.output_node().replace_input_with(program.graph.output_node().args[0][0], first)
    program.graph_signature.output_specs[0].arg.name = first.name
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["nn_module_stack"] = {
                f"{key}@3" if key.endswith("k.0") else key: entry
                for key, entry in node.meta["nn_module_stack"].items()
            }
    tree = unflattened(program)
    assert [call.name for call in tree.k[0].calls] == ["0@3"]
    assert torch.equal(tree(X), seeded(Nested).k[0](X))


class Prefixes(nn.Module):
    """Names that begin alike; a sibling called through a closure; more than ten layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(4, 4)
        self.layer10 = nn.Linear(4, 4)
        self.n2 = nn.Linear(4, 4)
        self.n = Calls(lambda x: self.n2(x * 1))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.n(self.layer10(x)))
        for layer in self.layers:
            x = layer(x)
        return x


class Calls(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = [function]
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.function[0](x))  # type: ignore[operator]


@pytest.mark.parametrize("way", ["non-strict", "strict", "loaded"])
def test_row_42_defect_6_prefixes_and_siblings(way: str) -> None:
    """`layer1` and `layer10`, `n` and `n2` are four modules, also where one calls the other."""
    program = program_of(seeded(Prefixes), (X,), way=way)
    callers = {str(call.site): program.calls.rows[call.parent].label for call in program.calls}
    assert callers["n2"] == "n"
    is_eager(program.unflatten(), seeded(Prefixes), (X,))


class Shared(nn.Module):
    """One instance under two names, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sub_net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.sub_net.add_module("2", self.sub_net[0])
        self.again = self.sub_net

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.sub_net(x))


@EVERY_WAY
def test_rows_37_138_139_defect_13_one_instance_under_two_names(way: str) -> None:
    """One instance under two names is one object in the tree, in either mode."""
    model = seeded(Shared)
    tree = tree_of(model, (X,), way=way)
    assert tree.sub_net[0] is tree.sub_net[2]
    assert tree.sub_net is tree.again
    assert len(list(tree.parameters())) == len(list(model.parameters()))
    everything = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert [name for name, _ in tree.named_modules(remove_duplicate=False)] == everything


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Embedding(8, 4)
        self.tokens = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.unused.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x))


@EVERY_WAY
def test_rows_141_142_143_tied_parameters(way: str) -> None:
    """A tied parameter is one object under all its names, those that nothing uses among them."""
    model = seeded(Tied)
    ids = torch.tensor([1, 2, 3])
    program = program_of(model, (ids,), way=way)
    (row,) = program.signature.inputs_of(whence.InputKind.PARAMETER)
    assert (row.path, row.aliases) == ("unused.weight", ("tokens.weight", "head.weight"))
    tree = tree_of(model, (ids,), way=way)
    assert tree.head.weight is tree.tokens.weight
    assert tree.head.weight is tree.unused.weight


class Loose(nn.Module):
    table: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("kept", torch.ones(4))
        self.plain = torch.full((4,), 3.0)
        self.alias = self.plain
        self.weights = {"w": nn.Parameter(torch.full((4,), 0.5))}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table + self.kept + self.plain + self.alias + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Parents(nn.Module):
    """One module with a non-persistent buffer under two parents, and one more of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Module()
        self.b: Any = nn.Module()
        self.a.loose = Loose()
        self.b.loose = self.a.loose
        self.other = Loose()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.b.loose(self.a.loose(x)))


@pytest.mark.sample(2)
@EVERY_WAY
def test_rows_49_144_145_147_148_buffers_and_constants(way: str) -> None:
    """Non-persistent buffers and constants are there and in no state dict; aliases are one input."""
    model = seeded(Parents)
    program = program_of(model, (X,), way=way)
    table = program.input("b.loose.table")  # strict mode knows it by this name alone
    assert (table.kind, table.persistent) == ("buffer", False)
    assert program.input("a.loose.kept").persistent
    assert program.input("a.loose.plain").kind == "constant"
    assert program.input("other.alias") is program.input("other.plain")
    tree = tree_of(model, (X,), way=way)
    assert "a.loose.table" in dict(tree.named_buffers())
    assert list(tree.state_dict()) == list(model.state_dict())
    assert tree.b.loose is tree.a.loose


class HandsAround(nn.Module):
    """A buffer of the root is handed to each layer, and layers hand values around through attributes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scale)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x * scale)


@EVERY_WAY
def test_row_130_buffer_handed_to_layers(way: str) -> None:
    """A buffer of the root that each layer is given is an argument of the layer."""
    model = seeded(HandsAround)
    tree = tree_of(model, (X,), way=way)
    assert torch.equal(tree.layers[1](X, X[0]), model.layers[1](X, X[0]))


class TwoGroups(nn.Module):
    """A module runs in two groups of operations with others in between, through a value it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(x)
        return self.linear(x) * cos + sin


class Rotary(nn.Module):
    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.linspace(0.1, 1.0, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = x * self.frequency
        return angle.cos(), angle.sin()


def test_defect_17_operations_in_two_groups() -> None:
    """A call whose operations a pass has pulled apart is one call again."""
    program = exported(seeded(TwoGroups), (X,))
    nodes = {node.name: node for node in program.graph.nodes}
    nodes["linear"].append(nodes["sin"])
    program.graph.lint()
    tree = unflattened(program)
    is_eager(tree, seeded(TwoGroups), (X,))
    assert len(tree.rotary.calls) == 1
    assert tree.rotary.forward_graph is not None
    assert len(tree.rotary.calls[0].call_plan.forward.outputs) == 2


def test_defect_17_operations_in_a_circle_are_flat() -> None:
    """A call that would have to run before and after another one is part of its caller: nothing is lost."""
    program = exported(seeded(TwoGroups), (X,))
    nodes = {node.name: node for node in program.graph.nodes}
    stack = nodes["cos"].meta["nn_module_stack"]
    nodes["add"].meta["nn_module_stack"] = stack
    is_eager(unflattened(program), seeded(TwoGroups), (X,))


@BOTH_FRONTS
def test_a_list_of_one_layer(way: str) -> None:
    """The same layer three times in a list is one module with three calls."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, nn.ReLU(), layer)
    tree = tree_of(copy.deepcopy(model), (X,), way=way)
    assert tree[0] is tree[1] is tree[3]


class Halved(nn.Module):
    """Two parameters of one memory, which are no tied parameter, in containers."""

    def __init__(self) -> None:
        super().__init__()
        same = torch.ones(4)
        self.listed = nn.ParameterList([same, same])
        self.named = nn.ParameterDict({"u": torch.ones(4), "v": torch.ones(4)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.listed[0] + self.listed[1].sin() * self.named["u"]


@BOTH_FRONTS
def test_row_92_parameters_of_one_memory_in_containers(way: str) -> None:
    """Two parameters that share memory stay two, and containers of parameters have theirs."""
    model = Halved()
    tree = tree_of(model, (X,), way=way)
    tree(X).sum().backward()
    model(X).sum().backward()
    for ours, theirs in zip(tree.parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert isinstance(tree.listed, nn.ParameterList)

"""Containers of modules and parameters, and recurrent modules: rows 88 to 95."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.upstream.checks import call_sites, equal, faithful, names, trains_alike

X = torch.randn(3, 4)


def linears(count: int) -> list[nn.Linear]:
    """So many linear layers."""
    return [nn.Linear(4, 4) for _ in range(count)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_row_88_recurrent_modules(kind: Any, bidirectional: bool) -> None:
    """Recurrent modules of two layers are captured with their backward, state given or not."""
    model = kind(4, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)
    program = faithful(model, torch.randn(2, 3, 4))
    assert len(names(program, "parameter")) == len(list(model.parameters()))
    state = torch.randn(4 if bidirectional else 2, 2, 5)
    faithful(model, torch.randn(2, 3, 4), (state, state + 1) if kind is nn.LSTM else state)


class Indexed(nn.ModuleList):
    """A list whose elements are found by name, too."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(int(index.removeprefix("layer")) if isinstance(index, str) else index)


class Listed(nn.Module):
    """A list used in every way a list can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(3))
        self.nested = nn.ModuleList([nn.ModuleList(linears(2)), nn.ModuleList(linears(1))])
        self.own = Indexed(linears(2))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        for index, (first, second) in enumerate(zip(self.layers, self.layers[::-1], strict=True)):
            x = first(x) + index * second(x)
        for group in self.nested:
            assert isinstance(group, nn.ModuleList)
            for layer in group:
                x = layer(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.own["layer1"](self.own[0](x)) * len(self.layers) + self.layers[-1](x)


def test_row_89_module_lists() -> None:
    """A list is indexed, iterated, zipped, sliced, nested and subclassed; calls keep their names."""
    model = Listed()
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert call_sites(program) == [
        *("", "layers.0", "layers.1", "layers.2"),
        *("layers.0@1", "layers.2@1", "layers.1@1", "layers.1@2", "layers.2@2", "layers.0@2"),
        *("nested.0.0", "nested.0.1", "nested.1.0"),
        *("layers.2@3", "layers.1@3", "layers.0@3"),
        *("own.0", "own.1", "layers.2@4"),
    ]
    tree: Any = program.unflatten()
    assert [len(tree.layers), len(tree.nested), len(tree.own)] == [3, 2, 2]


class Keyed(nn.Module):
    """A dict used in every way a dict can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"up": nn.Linear(4, 4), "mid.dle"[:3]: nn.Linear(4, 4), "down": nn.Linear(4, 4)}
        )
        self.own = Choosing({"only": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Any:
        x = self.layers["up"](x)
        for name in self.layers:
            x = self.layers[name](x)
        for layer in self.layers.values():
            x = layer(x)
        for name, layer in self.layers.items():
            x = layer(x) if name != "mid" else x
        for name in self.layers.keys():  # noqa: SIM118
            x = x + len(name)
        return self.own.chosen(x) if "only" in self.own and "other" not in self.own else x


class Choosing(nn.ModuleDict):
    """A dict with a method of its own."""

    def chosen(self, x: Tensor) -> Any:
        return self["only"](x)


def test_row_90_module_dicts() -> None:
    """A dict is read by key, by values, by items and by names, and may be subclassed."""
    model = Keyed()
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert call_sites(program) == [
        *("", "layers.up", "layers.up@1", "layers.mid", "layers.down"),
        *("layers.up@2", "layers.mid@1", "layers.down@1", "layers.up@3", "layers.down@2", "own.only"),
    ]


def test_row_91_sequential_with_one_module_several_times() -> None:
    """A module that stands in a sequence several times is called by each of its names, with one state."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared, nn.Tanh()))
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert call_sites(program) == ["", "0", "1", "2", "3", "3.0", "3.1"]
    assert names(program, "parameter") == ["p_0_weight", "p_0_bias"]
    tree: Any = program.unflatten()
    assert tree[0] is tree[2] is tree[3][0]


class Held(nn.Module):
    """Parameters in lists and dicts, plain and nested, iterated and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.keyed = nn.ParameterDict({"scale": nn.Parameter(torch.randn(4)), "shift": torch.randn(4)})
        self.mixed = nn.ParameterList([nn.ParameterList([torch.randn(4)]), torch.randn(4)])
        self.empty = nn.ParameterList()
        self.unused = nn.ModuleList([nn.Module()])

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.listed:
            x = x * parameter
        for parameter in self.listed[1:]:
            x = x + parameter
        for _, parameter in self.keyed.items():
            x = x - parameter
        return x * self.keyed["scale"] + self.mixed[0][0] * self.mixed[1] + len(self.empty)


def test_row_92_parameter_lists_and_dicts() -> None:
    """Lists and dicts of parameters keep their names, also in the tree, with modules that are empty."""
    model = Held()
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert [row.path for row in program.signature.inputs if row.kind == "parameter"] == [
        *("listed.0", "listed.1", "listed.2", "keyed.scale", "keyed.shift", "mixed.1", "mixed.0.0")
    ]
    tree = program.unflatten()
    assert list(tree.state_dict()) == list(model.state_dict())
    assert [name for name, _ in tree.named_modules()] == [name for name, _ in model.named_modules()]


class Plain(nn.Module):
    """Modules and tensors in Python's own containers: nobody registered them."""

    def __init__(self) -> None:
        super().__init__()
        self.modules_in_a_list = linears(2)
        self.in_a_tuple = (nn.Linear(4, 4), torch.randn(4))
        self.in_a_dict = {"layer": nn.Linear(4, 4)}

    def forward(self, x: Tensor) -> Any:
        for layer in self.modules_in_a_list:
            x = layer(x)
        layer, shift = self.in_a_tuple
        return self.in_a_dict["layer"](layer(x) + shift)


def test_row_93_plain_lists_of_modules() -> None:
    """Their tensors are constants of the program, and what they compute belongs to their caller."""
    model = Plain()
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert names(program, "parameter") == []
    assert len(names(program, "constant")) == 9
    expected = model(X)
    assert equal(program.module()(X), expected)
    assert equal(program.unflatten()(X), expected)


class Walking(nn.Module):
    """Finds its children by walking."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linears(2)
        self.group = nn.Sequential(*linears(2))

    def forward(self, x: Tensor) -> Any:
        for child in self.children():
            x = child(x)
        for name, child in self.named_children():
            x = child(x) if name != "group" else x
        for child in self._grandchildren():
            x = child(x)
        return x

    def _grandchildren(self) -> Iterator[nn.Module]:
        yield from self.group.children()


def test_row_94_children() -> None:
    """Modules found through `children()` and `named_children()` are known by their names."""
    model = Walking()
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert call_sites(program) == [
        *("", "first", "second", "group", "group.0", "group.1"),
        *("first@1", "second@1", "group.0@1", "group.1@1"),
    ]


class Summing(nn.Module):
    """Takes a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(2))

    def forward(self, items: list[Tensor]) -> list[Any]:
        return [layer(item) for layer, item in zip(self.layers, items, strict=True)]


class Giving(nn.Module):
    """Takes a list and hands lists on."""

    def __init__(self) -> None:
        super().__init__()
        self.summing = Summing()

    def forward(self, items: list[Tensor]) -> Any:
        left, right = self.summing(self.summing(items))
        return left * right


def test_row_95_lists_between_modules_and_a_second_capture() -> None:
    """Modules exchange lists; the tree is called with one, and captured again it is the same program."""
    model, items = Giving(), [X, X + 1]
    program = faithful(model, items)
    trains_alike(program, model, items)
    tree = program.unflatten()
    again = whence.capture(tree, (items,), backward=True)
    assert again.verify(model, (items,)).ok
    assert call_sites(again) == call_sites(program)
    inner: Any = tree.get_submodule("summing")
    assert equal(inner(items), model.summing(items))

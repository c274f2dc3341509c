"""What PyTorch's tree, pipelining and swap pin down beyond structure, on captured and on exported programs.

Rows 105, 120, 122, 129, 140, 149 to 151 and 171 to 173.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import CustomObjArgument, InputKind, InputSpec
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import register_dataclass

import whence

X = torch.arange(8.0).reshape(2, 4) / 10
Reader = Callable[..., whence.Program]


def captured(model: nn.Module, args: tuple[Any, ...], preserved: tuple[str, ...] = ()) -> whence.Program:
    """The program of whence's own capture."""
    return whence.capture(model, args, preserve_calls=preserved)


def exported(model: nn.Module, args: tuple[Any, ...], preserved: tuple[str, ...] = ()) -> whence.Program:
    """The program of an exported one."""
    with preserve_node_meta():
        return whence.from_exported_program(
            torch.export.export(model, args, preserve_module_call_signature=preserved)
        )


def strictly(model: nn.Module, args: tuple[Any, ...], preserved: tuple[str, ...] = ()) -> whence.Program:
    """The program of one that was exported by the strict front end."""
    with preserve_node_meta():
        return whence.from_exported_program(
            torch.export.export(model, args, strict=True, preserve_module_call_signature=preserved)
        )


EACH = pytest.mark.parametrize("read", [captured, exported, strictly], ids=lambda read: read.__name__)


def seeded(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()


class Reassigns(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table
        return x + self.table


def test_row_105_reassigned_buffer_is_no_write() -> None:
    """A buffer that is set to itself stays the state that it is, and is not written.

    torch.export of such a model fails in PyTorch 2.13 (a copy without a module).
    """
    model = Reassigns()
    program = whence.capture(model, (X,))
    assert program.signature.outputs_of(whence.OutputKind.MUTATION) == ()
    assert program.input("table").kind is whence.InputKind.BUFFER
    tree = program.unflatten()
    assert torch.equal(tree(X), model(X))
    assert tree.get_buffer("table") is model.table


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"stage": 0}):
            x = self.first(x)
        with annotate({"stage": 1}):
            return self.second(x).sin()


@EACH
def test_row_120_annotations_common_to_a_call(read: Reader) -> None:
    """What is said of all operations of a call is said of the call, at each level."""
    tree: Any = read(seeded(Annotated), (X,)).unflatten()
    calls = {
        node.target: node.meta["custom"]["stage"]
        for node in tree.forward_graph.nodes
        if node.op == "call_module"
    }
    assert calls == {"first": 0, "second": 1}
    inner = [node for node in tree.second.forward_graph.nodes if node.op == "call_module"]
    assert [node.meta["custom"]["stage"] for node in inner] == [1, 1]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@EACH
def test_row_122_pipeline_stages(read: Reader) -> None:
    """PyTorch's pipelining splits a tree into stages whose parameters have the original's names."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    model = seeded(Layers)
    split = {f"layers.{at}": pipelining.SplitPoint.BEGINNING for at in (1, 2, 3)}
    pipe = pipelining.pipeline(read(model, (X,)).unflatten(), mb_args=(X,), split_spec=split)
    stages = [pipe.get_stage_module(at) for at in range(pipe.num_stages)]
    x = X
    for at, stage in enumerate(stages):
        x = stage(x)
        assert list(stage.state_dict()) == [f"layers.{at}.weight", f"layers.{at}.bias"]
        assert torch.equal(stage.state_dict()[f"layers.{at}.bias"], model.layers[at].bias)
    assert len(stages) == 4
    assert torch.equal(x, model(X))


class Reuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, layer, layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@EACH
def test_row_140_reused_layer_has_one_placeholder(read: Reader) -> None:
    """A layer that a list holds three times is one input for each of its parameters."""
    program = read(seeded(Reuses), (X,))
    assert [row.path for row in program.signature.state] == ["layers.0.weight", "layers.0.bias"]
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    assert len(names) == len(set(names)) == 3
    assert torch.equal(program.unflatten()(X), seeded(Reuses)(X))


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(torch.float32) + 1).to(torch.float64)


@pytest.mark.parametrize("decomposed", [False, True])
def test_row_129_cast_in_front_of_a_preserved_module(decomposed: bool) -> None:
    """A cast that does nothing, in front of a preserved module, which is replaced then."""
    model = seeded(Casts)
    program = torch.export.export(model, (X,), preserve_module_call_signature=("inner",))
    tree: Any = whence.unflatten(program.run_decompositions({}) if decomposed else program)
    model.inner = nn.Linear(4, 4)
    tree.set_submodule("inner", model.inner)
    assert torch.equal(tree(X), model(X))


def test_row_129_cast_in_a_capture() -> None:
    """The same in a captured tree, which trains through the newcomer."""
    model = seeded(Casts)
    tree = whence.capture(model, (X,), backward=True, preserve_calls="inner").unflatten(copy=True)
    model.inner = nn.Linear(4, 4)
    tree.set_submodule("inner", deepcopy(model.inner))
    for module in (tree, model):
        module(X).sum().backward()
    assert torch.equal(tree.get_submodule("inner").weight.grad, model.inner.weight.grad)  # type: ignore[arg-type]


class ReturnsConstant(nn.Module):
    """Returns a tensor attribute, and writes to what was computed from it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.ones(4)
        self.trained = torch.full((4,), 2.0, requires_grad=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.own * 2
        y.add_(1)
        return x + y, self.own, x * self.trained


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsConstant()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x)


@EACH
def test_row_149_constants_are_returned(read: Reader) -> None:
    """A returned constant is eager's, one that requires a gradient still does, and none is written."""
    program = read(Holds(), (X,))
    assert program.signature.outputs_of(whence.OutputKind.MUTATION) == ()
    found, expected = program.unflatten()(X), Holds()(X)
    assert all(map(torch.equal, found, expected))
    assert [value.requires_grad for value in found] == [value.requires_grad for value in expected]


def test_row_149_bound_method_is_captured() -> None:
    """A method of a module is captured like the module, its constants among the state."""
    model = ReturnsConstant()
    program = whence.capture(model.forward, (X,))
    assert "own" in {row.path.rpartition(".")[2] for row in program.signature.state}
    assert all(map(torch.equal, program.module()(X), model(X)))


class UsesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.handle = object()

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 if self.handle is not None else 2)


def test_row_150_opaque_objects_are_constants() -> None:
    """An object that Python code alone looks at is no part of the program."""
    program = whence.capture(UsesObject(), (X,))
    assert program.signature.state == ()
    assert torch.equal(program.unflatten()(X), X + 1)


def test_row_150_script_objects_that_are_missing_are_refused() -> None:
    """An exported program with a script object among its inputs that it does not hold is refused by name."""
    program = torch.export.export(nn.ReLU(), (X,))
    spec = InputSpec(InputKind.CUSTOM_OBJ, CustomObjArgument("handle", "Handle"), "handle")
    program.graph_signature.input_specs.insert(0, spec)
    with pytest.raises(whence.UnsupportedGraph, match="handle"):
        whence.from_exported_program(program)


class Folds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.own = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.own * 3 + self.weight)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@EACH
def test_row_151_constants_are_folded(read: Reader) -> None:
    """PyTorch's split of what depends on constants alone works on a program's graph, and on nothing else."""
    const_fold: Any = pytest.importorskip("torch.fx.experimental.const_fold")
    program = read(Folds(), (X,)).with_state("attributes")
    before = str(program)
    folded = const_fold.split_const_subgraphs(deepcopy(program.graph_module))
    folded.run_folding()
    operators = [node for node in folded.graph.nodes if node.op == "call_function"]
    assert len(operators) == 1
    assert torch.equal(folded(X)[0], Folds()(X))
    assert str(program) == before


@dataclass
class Pair:
    """A registered container."""

    first: Tensor
    second: Tensor


register_dataclass(Pair)


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.linear(x), x.sin())


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair, *, last: Pair) -> Tensor:
        return self.linear(pair.second) + pair.first * last.first


class Chain(nn.Module):
    """Two modules with a container between them, whose parts are read in another order than made."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.takes = Makes(), Takes()

    def forward(self, pair: Pair, *, other: Pair) -> Pair:
        made = self.makes(pair.first)
        return Pair(made.second, self.takes(made, last=other) + pair.second)


def pairs() -> tuple[Pair, Pair]:
    return Pair(X, X + 1), Pair(X * 2, X * 3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", ["captured", "joint", "exported"])
@pytest.mark.parametrize("swapped", [(), ("makes",), ("takes",), ("makes", "takes")])
def test_rows_171_172_173_containers_between_swapped_modules(way: str, swapped: tuple[str, ...]) -> None:
    """Registered containers in, out and between; results in another order; none, one or both swapped."""
    model = seeded(Chain)
    one, other = pairs()
    names = ("makes", "takes")
    if way == "exported":
        program = torch.export.export(model, (one,), {"other": other}, preserve_module_call_signature=names)
        tree: Any = whence.unflatten(program)
    else:
        joint = way == "joint"
        captured = whence.capture(model, (one,), {"other": other}, backward=joint, preserve_calls=names)
        tree = captured.unflatten(copy=True)
    for name in swapped:
        new = {"makes": Makes, "takes": Takes}[name]()
        model.set_submodule(name, new)
        tree.set_submodule(name, deepcopy(new))
    found, expected = tree(one, other=other), model(one, other=other)
    assert type(found) is Pair
    assert torch.equal(found.first, expected.first)
    assert torch.equal(found.second, expected.second)
    for result in (found, expected):
        result.second.sum().backward()
    for held, original in zip(tree.parameters(), model.parameters(), strict=True):
        assert torch.equal(held.grad, original.grad)


@pytest.mark.parametrize("read", [captured, exported], ids=lambda read: read.__name__)
def test_row_171_exact_graph_without_containers(read: Reader) -> None:
    """Between two modules flat values go straight from the one to the other: no container is made or read."""
    one, _ = pairs()

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes, self.takes = Makes(), Takes()

        def forward(self, x: Tensor) -> Tensor:
            made = self.makes(x)
            return self.takes(made, last=made)

    tree: Any = read(seeded(Straight), (X,), ("makes", "takes")).unflatten()
    nodes = [(node.op, str(node.target)) for node in tree.forward_graph.nodes]
    getitem = ("call_function", str(operator.getitem))
    assert nodes == [
        ("placeholder", "x"),
        ("call_module", "makes"),
        getitem,
        getitem,
        ("call_module", "takes"),
        getitem,
        ("output", "output"),
    ]
    assert isinstance(tree.forward_graph, fx.Graph)
    assert one.first is X

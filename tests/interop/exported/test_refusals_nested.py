"""Branches and loops of exported programs: rows 44, 45 and 152 to 155, and defect 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import whence
from tests.interop.helpers import exported, loaded, program_of, unflattened

X = torch.arange(8.0).reshape(2, 4)
pytestmark = pytest.mark.filterwarnings(
    # torch.cond, called in eager, compiles itself and looks at the gradient of what it is given
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
WAYS = pytest.mark.parametrize("way", ["non-strict", "strict", "loaded"])


class Branches(nn.Module):
    """A condition with a submodule in one branch and constants in the other."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x) + self.shift, lambda x: x.cos() * 2, (x,))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch_map(lambda row, shift: self.linear(row) + shift, x, x[0].clone())  # type: ignore[arg-type]


class Scanned(nn.Module):
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        def step(carry: dict[str, Tensor], row: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            new = carry["sum"] * self.factor + row
            return {"sum": new}, new.sin()

        return scan(step, {"sum": torch.zeros(4)}, x)


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def more(count: Tensor, _x: Tensor) -> Tensor:
            return count < 3

        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, x * 2

        return while_loop(more, step, (torch.zeros((), dtype=torch.int64), x))[1]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> object:
        return self.inner(self.before(x))


KINDS = pytest.mark.parametrize("kind", [Branches, Mapped, Scanned, Loops])


def around(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return Around(kind())


def equal(left: object, right: object) -> bool:
    pairs = zip(torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sample(3)
@WAYS
@KINDS
def test_rows_152_153_154_155_run(kind: type[nn.Module], way: str) -> None:
    """A branch or loop runs in the tree as in eager, on either side of the condition."""
    model = around(kind)
    tree = unflattened(exported(model, (X,), way=way))
    for x in (X, -X):
        assert equal(tree(x), model(x))


@pytest.mark.sample(3)
@WAYS
@KINDS
def test_rows_44_45_defect_16_origins_in_branches(kind: type[nn.Module], way: str) -> None:
    """Operations of branches and loops are walked and selected, in the module that called them."""
    program = program_of(around(kind), (X,), way=way)
    inner = [
        node for node in program.nodes() if node.graph is not program.graph and node.op == "call_function"
    ]
    assert inner
    for node in inner:
        origin = program.where(node)
        assert str(origin.calls[0]).startswith("inner"), node
        assert origin.quality in ("exact", "inferred")
    assert inner[0] in program.select("inner")


@pytest.mark.sample(2)
@KINDS
def test_alone(kind: type[nn.Module]) -> None:
    """A module with a branch or loop works alone."""
    model = around(kind)
    tree = unflattened(exported(model, (X,)))
    found, expected = tree.inner(X), model.inner(X)
    assert equal(found, expected)


class Layers(nn.Module):
    """Two layers that differ in nothing but what is inside their branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scales(2), Scales(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scales(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * self.factor, lambda x: x - self.factor, (x,))


@WAYS
def test_branches_tell_layers_apart(way: str) -> None:
    """Calls that differ in a branch alone are not taken for equal."""
    model = Layers()
    tree = unflattened(exported(model, (X,), way=way))
    for x in (X, -X):
        assert torch.equal(tree(x), model(x))


@pytest.mark.sample(1)
@KINDS
def test_out_again(kind: type[nn.Module]) -> None:
    """A program with a branch or loop becomes an exported program again, and survives a file."""
    model = around(kind)
    program = program_of(model, (X,)).to_exported_program()
    for again in (program, loaded(program)):
        assert equal(again.module()(X), model(X))
        assert equal(unflattened(again)(X), model(X))


@pytest.mark.parametrize("view", ["attributes", "inputs"])
def test_state_as_attributes(view: str) -> None:
    """Both views of the state keep the graphs of branches."""
    model = around(Branches)
    program = program_of(model, (X,)).with_state("attributes").with_state(view)
    assert equal(program.module()(X), model(X))


def test_a_graph_of_a_branch_is_shown() -> None:
    """The graph of a module shows the branches it has."""
    tree = unflattened(exported(around(Branches), (X,)))
    graph = tree.inner.forward_graph
    assert graph is not None
    assert "cond" in str(graph)


@pytest.mark.sample(1)
@WAYS
def test_a_tree_with_a_branch_is_read_by_the_front_ends(way: str) -> None:
    """`torch.compile` of all of it, and strict export again."""
    model = Branches()
    tree = unflattened(exported(model, (X,), way=way))
    assert torch.equal(torch.compile(tree, backend="eager", fullgraph=True)(X), model(X))
    assert torch.equal(torch.export.export(tree, (X,), strict=True).module()(-X), model(-X))


class Biased(nn.Module):
    """Attention whose scores read a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + self.bias[h, i, j])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_values_of_transforms_are_refused_by_name() -> None:
    """PyTorch notes them in the graph, and cannot go on with them either; whence's own capture can."""
    model, x = Biased().requires_grad_(False), torch.randn(1, 2, 16, 8)
    with pytest.raises(whence.UnsupportedGraph, match="values of a transform"):
        whence.unflatten(torch.export.export(model, (x,)))
    assert whence.capture(model, (x,)).verify(model, (x,)).ok

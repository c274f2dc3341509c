"""Trees under `torch.compile`, strict export and `torch.fx`: rows 114 to 117, and defect 10."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

import whence

X = torch.arange(12.0).reshape(3, 4) / 10
ROWS = Dim("rows", min=2, max=10)


class Block(nn.Module):
    """A residual block with a counter, whose name the tree uses itself."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.down(self.up(x).relu())


class Switch(nn.Module):
    """Does one of two things, by a Python argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, down: bool = False, extra: Tensor | None = None) -> Tensor:
        x = self.down(x) if down else self.up(x)
        return x if extra is None else x + extra


class Through(nn.Module):
    """Calls a module of its parent's."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = [function]
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.functions[0](x))


class Model(nn.Module):
    """Equal layers, calls that differ, a sibling called in a module, constants and a dict out."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.switch = Switch()
        self.other = nn.Linear(4, 4)
        self.through = Through(lambda x: self.other(x * 2))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.total.add_(1)
        x = self.switch(self.through(x))
        self.total.mul_(2)
        for block in self.blocks:
            x = block(x)
        return {"x": self.switch(self.switch(x, True), extra=x) * scale, "total": self.total, "n": 3}


def fresh() -> Any:
    torch.manual_seed(0)
    return Model()


def own(sizes: Any = None) -> Any:
    """The tree of a captured program."""
    return whence.capture(fresh(), (X,), {"scale": 2.0}, dynamic_shapes=sizes).unflatten(copy=True)


def onto(sizes: Any = None) -> Any:
    """The tree as instances of the model's classes."""
    model = fresh()
    return whence.capture(model, (X,), {"scale": 2.0}, dynamic_shapes=sizes).unflatten(onto=model, copy=True)


def flat(sizes: Any = None) -> Any:
    """The flat module of a captured program."""
    return whence.capture(fresh(), (X,), {"scale": 2.0}, dynamic_shapes=sizes).module(copy=True)


def exported(sizes: Any = None) -> Any:
    """The tree of an exported program."""
    return whence.unflatten(torch.export.export(fresh(), (X,), {"scale": 2.0}, dynamic_shapes=sizes))


def joint(sizes: Any = None) -> Any:
    """The tree of a program with its backward."""
    program = whence.capture(fresh(), (X,), {"scale": 2.0}, backward=True, dynamic_shapes=sizes)
    return program.unflatten(copy=True)


pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"  # Dynamo looks at the inputs of a compiled child
)
FORWARD = pytest.mark.parametrize("tree", [own, onto, flat, exported], ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(run: Callable[..., Any], tree: nn.Module, x: Tensor = X) -> None:
    """Two runs are eager's in results, gradients and buffers."""
    eager = fresh()
    for _ in range(2):
        found, expected = run(x, scale=2.0), eager(x, scale=2.0)
        assert list(found) == list(expected)
        assert torch.equal(found["x"], expected["x"])
        assert torch.equal(found["total"], expected["total"])
        assert found["n"] == 3
    found["x"].sum().backward()
    expected["x"].sum().backward()
    for (name, held), other in zip(tree.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(held.grad, other.grad), name  # type: ignore[arg-type]
    for (name, buffer), other_buffer in zip(tree.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(buffer, other_buffer), name


@pytest.mark.sample(1)
@FORWARD
def test_row_115_root_is_compiled_whole(tree: Any) -> None:
    """`torch.compile(fullgraph=True)` of the root runs and trains as eager, and writes its buffers."""
    made = tree()
    same(torch.compile(made, fullgraph=True, backend="aot_eager"), made)


def test_row_114_children_are_compiled() -> None:
    """A child compiles whole, in each of its captured ways."""
    model, tree = fresh(), own()
    compiled: Any = torch.compile(tree.switch, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), model.switch(X))
    assert torch.equal(compiled(X, True), model.switch(X, True))
    assert torch.equal(compiled(X, down=True), model.switch(X, True))
    assert torch.equal(compiled(X, extra=X + 1), model.switch(X, extra=X + 1))


@pytest.mark.parametrize("tree", [own, exported, joint], ids=lambda make: make.__name__)
def test_row_115_modules_are_compiled_in_place(tree: Any) -> None:
    """A child's own `compile()` compiles it, once, where the tree calls it."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    made = tree()
    made.blocks[1].compile(backend=backend, fullgraph=True)
    same(made, made)
    assert len(graphs) == 1


def test_row_115_root_is_compiled_in_place() -> None:
    """The root's own `compile()` compiles it whole."""
    made = own()
    made.compile(backend="eager", fullgraph=True)
    same(made, made)


@pytest.mark.sweep
def test_compiled_code_follows_the_sizes() -> None:
    """A compiled tree with open sizes takes others; one without refuses them, as the tree itself does."""
    named = {"x": {0: ROWS}, "scale": None}
    opened: Any = torch.compile(own(named), backend="eager")
    opened_eager = fresh()
    for rows in (3, 5):
        assert torch.equal(
            opened(torch.ones(rows, 4), scale=2.0)["x"], opened_eager(torch.ones(rows, 4), scale=2.0)["x"]
        )
    compiled: Any = torch.compile(own(), backend="eager")
    for x, scale in ((torch.ones(5, 4), 2.0), (X, 3.0)):
        with pytest.raises(whence.CallError):
            compiled(x, scale=scale)
    with pytest.raises(whence.CallError, match="at most 10"):
        opened(torch.ones(12, 4), scale=2.0)


def test_joint_tree_under_compile() -> None:
    """A joint tree runs as one function where gradients are recorded: it says why it is no whole graph."""
    tree: Any = joint()
    told = r"its backward was captured, .*; leave out fullgraph=True, .*, or run it under torch\.no_grad\(\)"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told):
        torch.compile(tree, fullgraph=True, backend="eager")(X, scale=2.0)
    same(torch.compile(tree, backend="aot_eager"), tree)
    with torch.no_grad():
        found = torch.compile(joint(), fullgraph=True, backend="eager")(X, scale=2.0)
    assert torch.equal(found["x"], fresh()(X, scale=2.0)["x"])


def test_hooks_and_newcomers_under_compile() -> None:
    """Where a hook or another module is in a tree the compiler stops, and the numbers are eager's."""
    model = fresh()
    program = whence.capture(model, (X,), {"scale": 2.0}, preserve_calls="blocks.1")
    tree, seen = program.unflatten(copy=True), list[Any]()
    tree.get_submodule("blocks.0").register_forward_hook(lambda *_: seen.append(1))
    torch.manual_seed(1)
    model.blocks[1] = Block()
    tree.set_submodule("blocks.1", model.blocks[1])
    eager = deepcopy(model)
    compiled: Any = torch.compile(tree, backend="eager")
    assert torch.equal(compiled(X, scale=2.0)["x"], eager(X, scale=2.0)["x"])
    assert seen == [1]
    tree.get_submodule("blocks.0")._forward_hooks.clear()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"another module .*; leave out fullgraph=True"):
        torch.compile(tree, fullgraph=True, backend="eager")(X, scale=2.0)


SITES = [
    "",
    "through",
    "other",
    "through.own",
    "switch",
    "switch.up",
    "blocks.0",
    "blocks.0.up",
    "blocks.0.down",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tree", [own, onto, exported, joint], ids=lambda make: make.__name__)
def test_row_117_defect_10_exported_again(tree: Any, strict: bool) -> None:
    """A tree exports again by either front end, and is the same modules and numbers then."""
    again = torch.export.export(tree(), (X,), {"scale": 2.0}, strict=strict)
    sites = [str(call.site) for call in whence.from_exported_program(again).calls]
    if not (strict and tree is onto):  # there, a second call of a module with its own `forward` has no number
        assert sites[:9] == SITES
    made = whence.unflatten(again)
    assert torch.equal(made(X, scale=2.0)["x"], fresh()(X, scale=2.0)["x"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tree", [own, exported], ids=lambda make: make.__name__)
def test_defect_10_exported_again_with_open_sizes(tree: Any, strict: bool) -> None:
    """With sizes left open by the names of the original's arguments, and unflattened once more."""
    named = {"x": {0: ROWS}, "scale": None}
    again = torch.export.export(tree(named), (X,), {"scale": 2.0}, strict=strict, dynamic_shapes=named)
    made = whence.unflatten(again)
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(made(x, scale=2.0)["x"], fresh()(x, scale=2.0)["x"])
    with pytest.raises(whence.CallError, match="is 11"):
        made(torch.ones(11, 4), scale=2.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tree", [own, exported, joint], ids=lambda make: make.__name__)
def test_tree_of_a_tree_with_open_sizes(tree: Any) -> None:
    """A tree is captured again with open sizes, and the tree of that again."""
    sizes, made = {"x": {0: ROWS}, "scale": None}, None
    made = tree(sizes)
    for _ in range(2):
        program = whence.capture(made, (X,), {"scale": 2.0}, dynamic_shapes=sizes)
        assert [str(call.site) for call in program.calls][:9] == SITES
        made = program.unflatten(copy=True)
    x = torch.randn(6, 4)
    assert torch.equal(made(x, scale=2.0)["x"], fresh()(x, scale=2.0)["x"])


@pytest.mark.parametrize("tree", [own, flat, exported], ids=lambda make: make.__name__)
def test_row_114_traced_by_fx(tree: Any) -> None:
    """`symbolic_trace` reads a tree without running it; the graph has its operators and its state."""
    made = tree()
    graph = fx.symbolic_trace(made)
    operators = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert operators & {"aten.addmm.default", "aten.linear.default"}
    assert "blocks.1.up.weight" in {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    assert torch.equal(graph(X, scale=2.0)["x"], fresh()(X, scale=2.0)["x"])


def test_row_116_traced_by_fx_with_placeholders() -> None:
    """With `PH` for each flat input, as PyTorch's own tree takes it, and inside another module."""

    class Sums(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return x[0] + x[1]

    graph = fx.symbolic_trace(
        whence.unflatten(torch.export.export(Sums(), ((X, X * 2),), strict=True)),
        concrete_args=(fx.PH, fx.PH),  # type: ignore[arg-type]
    )
    assert torch.equal(graph(X, X * 2), X * 3)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tree = own()

        def forward(self, x: Tensor) -> Any:
            return self.tree(x, scale=2.0)["x"] + 1

    around = Around()
    expected = deepcopy(around)(X)
    assert torch.equal(fx.symbolic_trace(around)(X), expected)


def test_more_trees_than_a_compiler_compiles_of_one_function() -> None:
    """Each tree is code of its own: compiled beside many others, each is compiled whole."""
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for width in (2, 3, 4):
            model, x = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)), torch.ones(3, width)
            tree = whence.capture(model, (x,), preserve_calls="*").unflatten(copy=True)
            assert torch.equal(torch.compile(tree, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize(("limit", "is_swapped"), [(1, False), (2, True), (3, True)])
def test_compiler_that_has_given_up(limit: int, is_swapped: bool) -> None:
    """Whatever of a tree it still reads: gradients and buffers are eager's, and nothing is warned of."""
    with torch._dynamo.config.patch(accumulated_recompile_limit=limit):
        for _ in range(3):
            model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
            tree = whence.capture(model, (X,), preserve_calls="0").unflatten(copy=True)
            run = torch.compile(tree, backend="eager")
            assert torch.equal(run(X), model(X))
            if is_swapped:
                tree.set_submodule("0", deepcopy(model[0]))
            for one in (run, model):
                one(X).sin().sum().backward()
            assert trained(tree) == trained(model)


def trained(model: nn.Module) -> list[Any]:
    """The gradients and buffers of a model, as plain values."""
    gradients = [None if weight.grad is None else weight.grad.tolist() for weight in model.parameters()]
    return [*gradients, *(buffer.tolist() for buffer in model.buffers())]


@pytest.mark.parametrize("stance", ["eager_on_recompile", "force_eager"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("limit", [1, 64])
def test_stance_in_which_nothing_is_compiled(stance: str, backward: bool, limit: int) -> None:
    """A tree runs as it is, what was compiled before of it and what was not."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    program = whence.capture(model, (X,), backward=backward, preserve_calls="0")
    tree = program.unflatten(copy=True)
    run = torch.compile(tree, backend="eager")
    with torch._dynamo.config.patch(accumulated_recompile_limit=limit):
        for one in (run, model):
            one(X).sin().sum().backward()
        with torch.compiler.set_stance(stance):
            for grads in (True, False):
                tree.get_parameter("1.bias").requires_grad_(grads or backward)
                model.get_parameter("1.bias").requires_grad_(grads or backward)
                for one in (run, model):
                    one(X).sin().sum().backward()
                assert trained(tree) == trained(model)

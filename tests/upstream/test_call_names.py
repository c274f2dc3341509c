"""By which names module calls are known: rows 37 to 48, but for control flow and runtime asserts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import whence
from tests.models import case
from tests.upstream.checks import call_sites, call_targets, equal, gradients, operations
from tests.upstream.modules import Block, Counter


def _graph(module: nn.Module, number: int = 0) -> fx.Graph:
    """The forward graph of one call of a module in a tree."""
    assert isinstance(module, whence.Tree)
    graph = module.calls[number].graph(whence.Phase.FORWARD)
    assert graph is not None
    return graph


def _check(model: nn.Module, *args: Any) -> whence.Program:
    """Capture with a backward; the program, its flat module and its tree compute what eager does."""
    program = whence.capture(model, args, backward=True)
    assert program.verify(model, args).ok
    expected = model(*args)
    assert equal(program.module()(*args), expected)
    assert equal(program.unflatten()(*args), expected)
    return program


def test_row_37_calls_are_named_by_the_path_of_access() -> None:
    """A shared module is known by the name it was reached through: `sub_net.0`, then `sub_net.2`."""
    shared = Block()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub_net = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU())
            self.direct = shared
            self.listed = nn.ModuleList([nn.Identity(), shared])
            self.named = nn.ModuleDict({"a": shared})

        def forward(self, x: Tensor) -> Tensor:
            x = self.direct(self.sub_net(x))
            x = self.listed[1](x)
            for layer in self.listed:
                x = layer(x)
            return self.named["a"](x)

    x = torch.randn(3, 4)
    program = _check(Net(), x)
    sites = [site for site in call_sites(program) if not site.endswith(("up", "down", "@1"))]
    assert sites == [
        *("", "sub_net", "sub_net.0", "sub_net.1", "sub_net.2", "sub_net.3"),
        *("direct", "listed.1", "listed.0", "named.a"),
    ]
    assert "listed.1@1" in call_sites(program)
    for name in ("sub_net.0", "sub_net.2", "direct", "named.a"):
        [tanh] = program.select(f"{name} :: aten.tanh.default")
        assert [str(call) for call in program.where(tanh).calls] == [name]
        [linear] = program.select(f"{name}.up :: aten.addmm.default :: forward")
        assert str(program.where(linear).calls[0]) == f"{name}.up"


def test_row_38_slices_keep_real_names() -> None:
    """Modules reached through a slice of a list or a sequence keep the names they have in the model."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mod_list_1 = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.mod_list_2 = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.mod_list_1[2:]:
                x = layer(x)
            x = self.mod_list_2[1:3](x)
            x = self.mod_list_2[-1](x)
            for layer in reversed(self.mod_list_1[:2]):
                x = layer(x)
            return self.mod_list_1[-3:-1][0](x)

    program = _check(Sliced(), torch.randn(3, 4))
    assert call_sites(program) == [
        *("", "mod_list_1.2", "mod_list_1.3", "mod_list_2.1", "mod_list_2.2", "mod_list_2.3"),
        *("mod_list_1.1", "mod_list_1.0", "mod_list_1.1@1"),
    ]
    tree: Any = program.unflatten()
    children = {name for name, _ in tree.named_modules()}
    assert children == {name for name, _ in Sliced().named_modules()}
    assert operations(_graph(tree.mod_list_1[2])) == ["aten.t.default", "aten.addmm.default"]


def holds(program: whence.Program, call: whence.Call) -> bool:
    """Whether a call, or one inside it, has operations; a dropout in evaluation has none."""
    return any(call in program.calls.chain(program.call_of(node)) for node in operation_nodes(program))


def operation_nodes(program: whence.Program) -> list[fx.Node]:
    """The operations of a program."""
    return [node for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("form", ["module", "unflatten"])
def test_row_39_a_second_capture_gives_the_same_calls(form: str) -> None:
    """Capturing a program's flat module or tree again gives the same calls, classes, lines and outputs."""
    for name in ("shared_layer", "named_branches"):
        model, args, kwargs = case(name).make()
        first = whence.capture(model, args, kwargs)
        module = first.module() if form == "module" else first.unflatten()
        second = whence.capture(module, args, kwargs)
        assert equal(second.module()(*args, **kwargs), model(*args, **kwargs))
        assert operations(second.graph) == operations(first.graph)
        assert [row.path for row in second.signature.state] == [row.path for row in first.signature.state]
        assert str(second.signature) == str(first.signature)
        assert list(map(str, second.calls)) == [str(call) for call in first.calls if holds(first, call)]
        for node in second.graph.nodes:
            assert second.where(node) == first.where(node.name)


def test_row_40_a_module_made_in_forward_has_no_name() -> None:
    """The operations of a module made during the forward belong to its caller, and the module has no call."""

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Sequential(nn.ReLU(), nn.LayerNorm(4, elementwise_affine=False))(x) + 1

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.makes = Makes()

        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(dim=-1)(self.makes(self.linear(x)))

    model, x = Around(), torch.randn(3, 4)
    program = _check(model, x)
    assert call_sites(program) == ["", "linear", "makes"]
    expected = {"aten.relu.default": "makes", "aten.native_layer_norm.default": "makes"}
    expected |= {"aten.add.Tensor": "makes", "aten._softmax.default": ""}
    for operation, caller in expected.items():
        [node] = program.select(f"** :: {operation} :: forward")
        assert [str(call) for call in program.where(node).calls] == [caller]
    tree: Any = whence.capture(model, (x,)).unflatten()
    assert [name for name, _ in tree.named_modules()] == ["", "linear", "makes"]
    assert operations(_graph(tree.makes)) == [
        *("aten.relu.default", "aten.layer_norm.default", "aten.add.Tensor")
    ]
    assert torch.equal(tree.makes(x), model.makes(x))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *((name, False) for name in ("unet", "diffusion_transformer", "named_branches", "dense_experts")),
        ("named_branches", True),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in ("unet", "diffusion_transformer", "dense_experts")
        ),
    ],
)
def test_row_41_leaves_are_those_of_torch_export(name: str, strict: bool) -> None:
    """The leaves of the tree hold the operations that strict and non-strict export give, and run alone."""
    model, args, kwargs = case(name).make()
    tree = whence.capture(model, args, kwargs).unflatten()
    theirs = torch.export.unflatten(torch.export.export(model, args, kwargs, strict=strict))
    calls = _watch(model)
    expected = model(*args, **kwargs)
    assert equal(tree(*args, **kwargs), expected)
    assert calls
    for path, (given, result) in calls.items():
        leaf, other = tree.get_submodule(path), theirs.get_submodule(path)
        assert equal(leaf(*given), result)
        if hasattr(other, "graph"):  # theirs has none for an identity
            assert operations(_graph(leaf)) == operations(whence.capture(other, given).graph), path
            assert equal(other(*given), result)
        else:
            assert operations(_graph(leaf)) == []


def _watch(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The arguments and the result of the first call of every leaf, filled in by the next run."""
    seen: dict[str, tuple[Any, Any]] = {}

    def watcher(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_module: nn.Module, args: Any, result: Any) -> None:
            seen.setdefault(path, pytree.tree_map_only(Tensor, Tensor.detach, (args, result)))

        return note

    for path, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(watcher(path))
    return seen


def test_row_42_calls_that_are_no_chain_of_prefixes() -> None:
    """A patched forward and a closure that calls a sibling keep every call's own path; the tree runs."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.ModuleDict({"one": Block(), "two": Block()})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.table.values():
                x = layer(x)
            return x

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call: Callable[[Tensor], Tensor] | None = None
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert self.call is not None
            return self.linear(self.call(x))

    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = Calls()
            self.n2 = Block()
            self.experts = Experts()
            self.n.call = lambda x: self.n2(x) + 1

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(self.n(x)) + self.n2(x)

    model, x = Siblings(), torch.randn(3, 4)
    patched, inner = model.experts.table["two"], model.experts.table["two"].forward
    patched.forward = lambda x: inner(x) + model.n2.down(inner(x).repeat(1, 2))
    program = _check(model, x)
    parents = {str(call.site): str(program.calls.rows[call.parent].site) for call in program.calls}
    assert parents["n2"] == "n"
    assert parents["n2.up"] == "n2"
    assert parents["experts.table.two.up@1"] == "experts.table.two"
    assert parents["n2.down@1"] == "experts.table.two"
    assert parents["n2@1"] == ""
    tree: Any = program.unflatten()
    assert [name for name, _ in tree.named_modules()] == [name for name, _ in model.named_modules()]
    assert equal(
        gradients(tree, lambda: tree(x).square().sum()), gradients(model, lambda: model(x).square().sum())
    )
    assert torch.equal(tree.experts(x), model.experts(x))


def test_row_46_specialisations_are_numbered_in_the_parent() -> None:
    """Different specialisations of one module appear in the parent as `base`, `base@1`, `base@2`."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            x = self.linear(x)
            return {"plain": x, "sine": torch.sin(x), "twice": x + self.linear(x)}[mode]

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Base()

        def forward(self, x: Tensor) -> Tensor:
            return self.base(self.base(self.base(x), "sine"), mode="twice")

    model, x = Parent(), torch.randn(3, 4)
    program = _check(model, x)
    tree: Any = program.unflatten()
    assert call_targets(tree.forward_graph) == ["base", "base@1", "base@2"]
    assert [call.name for call in tree.base.calls] == ["base", "base@1", "base@2"]
    assert [[target for target in operations(_graph(tree.base, i)) if "sin" in target] for i in range(3)] == [
        *([], ["aten.sin.default"], [])
    ]
    assert torch.equal(tree.base(x), model.base(x))
    assert torch.equal(tree.base(x, "sine"), model.base(x, "sine"))
    assert torch.equal(tree.base(x, mode="twice"), model.base(x, "twice"))
    assert list(tree.state_dict()) == list(model.state_dict())
    tree(x)
    tree.base(x)
    assert torch.equal(tree(x), model(x))


def test_row_47_calls_with_gaps_receive_their_parameters() -> None:
    """Where the calls between compute nothing, the last one still has its parameters and gradients."""

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.counter = Counter()

        def forward(self, x: Tensor, active: bool) -> Tensor:
            return torch.sin(x * self.weight) if active else x

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: Tensor) -> Tensor:
            x = self.leaf(x, True)
            x = self.leaf(x, False)
            self.leaf(x, True)
            return self.leaf(x, True)

    model, x = Gaps(), torch.randn(3, 4)
    program = _check(model, x)
    assert call_sites(program) == ["", "leaf", "leaf@1", "leaf@2", "leaf@3"]
    assert len(program.select("** :: aten.sin.default :: forward")) == 2
    tree: Any = program.unflatten()
    targets = call_targets(tree.forward_graph)
    assert targets[0] == "leaf"
    assert targets[-1] == "leaf@3"
    for number in (0, 3):
        reads = [node.target for node in _graph(tree.leaf, number).nodes if node.op == "get_attr"]
        assert reads == ["weight"]
    assert equal(
        gradients(tree, lambda: tree(x).square().sum()), gradients(model, lambda: model(x).square().sum())
    )
    with torch.no_grad():
        model.leaf.weight.mul_(2)
    assert torch.equal(tree(x), model(x))
    tree.leaf.weight = nn.Parameter(torch.ones(4))
    assert torch.equal(tree(x), torch.sin(torch.sin(x)))


def test_row_48_numbered_calls_add_no_modules() -> None:
    """Numbered calls add no modules and no state; modules whose own names end in `@1` stay apart."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = Block()
            self.add_module("n@1", nn.Linear(4, 4))
            self.a = Block()
            self.add_module("n@1@1", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(self.n(self.n(x)))
            odd, odder = getattr(self, "n@1"), getattr(self, "n@1@1")
            return odder(odd(torch.sin(odd(x)))) + self.n(x)

    model, x = Named(), torch.randn(3, 4)
    program = _check(model, x)
    tree: Any = program.unflatten()
    assert [name for name, _ in tree.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(tree.state_dict()) == list(model.state_dict())
    calls = [call for call in program.calls if len(call.site.path) == 1]
    assert [(call.site.path.name, call.site.index) for call in calls] == [
        *(("n", 0), ("n", 1), ("a", 0), ("n@1", 0), ("n@1", 1), ("n@1@1", 0), ("n", 2))
    ]
    assert program.calls.at("n", 1).number != program.calls.at("n@1").number
    [inner] = program.select("n@1@1 :: aten.addmm.default :: forward")
    assert program.where(inner).calls[0].path == whence.ModulePath(("n@1@1",))
    assert torch.equal(tree.get_submodule("n@1")(x), model.get_submodule("n@1")(x))
    assert torch.equal(tree.n(x), model.get_submodule("n")(x))
    assert equal(
        gradients(tree, lambda: tree(x).square().sum()), gradients(model, lambda: model(x).square().sum())
    )

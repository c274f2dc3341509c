"""What a program says about its inputs, state and nodes: rows 22 to 36."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import whence
from tests.models import case
from tests.upstream.checks import equal, names, operations
from tests.upstream.modules import Block, Counter


def test_row_22_placeholder_names() -> None:
    """User inputs keep their own names; state is prefixed by its kind, and numbered where a name is taken."""

    class Clash(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.linear_weight = nn.Parameter(torch.randn(4))
            self.register_buffer("mean", torch.zeros(4))
            self.table = torch.ones(4)

        def forward(self, p_linear_weight: Tensor, b_mean: Tensor, input: Tensor, t: list[Tensor]) -> Tensor:
            x = self.linear(p_linear_weight) * self.linear_weight + self.mean + b_mean + self.table
            return x + input + t[0] + torch.tensor([1.0, 2.0, 3.0, 4.0])

    model, x = Clash(), torch.randn(4)
    program = whence.capture(model, (x, x + 1, x + 2, [x + 3]), backward=True)
    assert names(program, "user") == ["p_linear_weight", "b_mean", "input", "t_0"]
    paths = {row.path: row.name for row in program.signature.inputs if row.kind in ("parameter", "buffer")}
    assert set(paths) == {"linear.weight", "linear.bias", "linear_weight", "mean"}
    assert paths["linear.bias"] == "p_linear_bias"
    assert {paths["linear.weight"], paths["linear_weight"]} == {"p_linear_weight_1", "p_linear_weight_2"}
    assert paths["mean"] == "b_mean_1"
    assert program.input("table").name == "c_table"
    assert names(program, "constant")[1].startswith("c_")
    every = [row.name for row in program.signature.inputs]
    assert every == [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert len(set(every)) == len(every)
    assert program.input("linear.weight").name == paths["linear.weight"]
    assert program.input("p_linear_weight").kind == "user"
    assert program.output("linear.weight").of == paths["linear.weight"]
    assert program.verify(model, (x, x + 1, x + 2, [x + 3])).ok


def test_row_23_user_inputs_follow_the_call() -> None:
    """User inputs come as they were passed: positional ones first, then keywords in the order given."""

    class Kinds(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *rest: Tensor, c: Tensor, d: Tensor, **more: Any) -> Tensor:
            return a + 2 * b + sum(rest) * c - d + more["e"] * more["f"]

    values = {name: torch.randn(2) for name in "cdef"}
    a, b, extra = torch.randn(2), torch.randn(2), torch.randn(2)
    for order in [*itertools.permutations(values)][::5]:
        kwargs = {name: values[name] for name in order}
        program = whence.capture(Kinds(), (a, b, extra, a), kwargs)
        assert names(program, "user") == ["a", "b", "rest_0", "rest_1", *order]
        paths = [row.path for row in program.signature.inputs]
        assert paths == [*(f"args[{i}]" for i in range(4)), *(f"kwargs[{name!r}]" for name in order)]
        assert torch.equal(program.module()(a, b, extra, a, **values), Kinds()(a, b, extra, a, **kwargs))

    class Simple(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first - second

    swapped = whence.capture(Simple(), (), {"second": a, "first": b})
    assert names(swapped, "user") == ["second", "first"]
    assert torch.equal(swapped.module()(second=a, first=b), b - a)
    assert torch.equal(swapped.module()(b, a), b - a)


def test_row_24_state_dict_keeps_names_and_values() -> None:
    """The flat module's state dict has the model's names, in its order, over the very same tensors."""
    for name in ("named_branches", "tied_language_model", "partly_frozen", "constants", "gpt2"):
        model, args, kwargs = case(name).make()
        program = whence.capture(model, args, kwargs)
        eager = model.state_dict()
        for module in (program.module(), program.unflatten(), program.with_state("attributes").module()):
            held = module.state_dict()
            assert list(held) == list(eager)
            assert all(held[key].data_ptr() == eager[key].data_ptr() for key in eager)
            assert all(torch.equal(held[key], eager[key]) for key in eager)
            assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
            assert all(p is dict(model.named_parameters())[key] for key, p in module.named_parameters())
            module.load_state_dict(eager)


def test_row_25_a_node_leads_to_its_tensor() -> None:
    """An input says whether it is a parameter or a buffer, and its state is the model's own object."""
    model, args, kwargs = case("running_statistics").make()
    for state in ("inputs", "attributes"):
        program = whence.capture(model, args, kwargs, state=state)
        for kind, held in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for path, tensor in held:
                row = program.input(path)
                assert row.kind == kind
                assert program.state[row.name] is tensor
                assert program.input(row.name) is row
                assert program.node(row.name).op == ("placeholder" if state == "inputs" else "get_attr")
                assert (row.module, row.module_type) == (
                    whence.ModulePath.parse(path).parent,
                    type(model.get_submodule(path.rpartition(".")[0])).__name__,
                )
        user = program.signature.inputs[-1]
        assert user.kind == "user"
        assert user.name not in program.state


def test_row_26_state_dict_names_flat_nested_and_of_a_method() -> None:
    """State keeps its names for a flat model, a nested one and a bound method; other objects are refused."""

    class Flat(nn.Module):
        offset: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("offset", torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.offset

        def other(self, x: Tensor) -> Tensor:
            return x - self.offset

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Flat(), Flat()])
            self.named = nn.ModuleDict({"block": Block()})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.named["block"](x)

        def part(self, x: Tensor) -> Tensor:
            layer = self.layers[1]
            assert isinstance(layer, Flat)
            return layer.other(x)

    flat, nested, x = Flat(), Nested(), torch.randn(3, 4)
    pairs: dict[Any, nn.Module] = {flat: flat, flat.other: flat, nested: nested, nested.part: nested}
    for captured, owner in pairs.items():
        program = whence.capture(captured, (x,))
        assert equal(dict(program.module().state_dict()), dict(owner.state_dict()))
        assert equal(dict(program.unflatten().state_dict()), dict(owner.state_dict()))
        assert torch.equal(program.module()(x), captured(x))
    others: list[Any] = [3, "model", flat.state_dict(), [flat], None]
    for other in others:
        with pytest.raises(whence.NotCallable, match=f"got {type(other).__name__}"):
            whence.capture(other, (x,))


def test_row_27_names_are_those_before_state_dict_hooks() -> None:
    """State dict hooks that rename keys are not run by a capture and do not change the names of inputs."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 4)
    ran = []

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        ran.append(prefix)
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}renamed.{key.removeprefix(prefix)}"] = state.pop(key)

    model[0].register_state_dict_post_hook(rename)
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: ran.append("before"))
    program = whence.capture(model, (x,), backward=True)
    flat, tree = program.module(), program.unflatten()
    plain = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert ran == []
    assert [row.path for row in program.signature.state] == plain
    assert sorted(flat.state_dict()) == sorted(tree.state_dict()) == sorted(plain)
    assert ran == []
    assert program.verify(model, (x,)).ok
    assert "0.renamed.up.weight" in model.state_dict()
    assert len(ran) == 2


def test_row_28_requires_grad_is_visible() -> None:
    """Whether a parameter or an input requires a gradient shows on its placeholder and in the signature."""
    model = nn.Sequential(Block(), Block())
    model[1].requires_grad_(False)
    model.get_parameter("1.down.weight").requires_grad_(True)
    x, mask = torch.randn(3, 4, requires_grad=True), torch.ones(4)

    def run(x: Tensor, mask: Tensor) -> Tensor:
        return model(x) * mask

    program = whence.capture(run, (x, mask), backward=True)
    expected = {f"model.{name}": p.requires_grad for name, p in model.named_parameters()}
    expected |= {"args[0]": True, "args[1]": False, "model.0.scale": False, "model.1.scale": False}
    shown = {row.path: row.value.requires_grad for row in program.signature.inputs if row.kind != "tangent"}
    assert shown == expected
    for row in program.signature.inputs:
        assert program.node(row.name).meta["val"].requires_grad == row.value.requires_grad
    differentiated = {row.path for row in program.signature.outputs if row.kind == "gradient"}
    assert differentiated == {path for path, requires in expected.items() if requires}


def test_row_29_the_signature_prints() -> None:
    """A signature prints one line for every input and output, in order, exactly so."""

    def loss(outputs: dict[str, Any]) -> Tensor:
        total: Tensor = outputs["sum"]
        return total

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()
            self.same = self.counter
            self.table = torch.arange(2)

        def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
            return {"sum": (self.counter(x) * self.table * scale).sum(), "scale": scale}

    program = whence.capture(Sums(), (torch.randn(2), 2.0), backward=loss)
    written = program.output("new_b_counter_count").node
    assert str(program.signature) == _SUMS.format(written=written)
    assert str(program.signature) in str(program)


_SUMS = """\
  in   parameter p_counter_weight: f32[2]  counter.weight = same.weight
  in   buffer    b_counter_count: f32[2]  counter.count = same.count
  in   constant  c_table: i64[2]  table
  in   user      x: f32[2]  args[0]
  in   user      scale: 2.0  args[1]
  out  loss      loss <- sum_1  loss
  out  user      output_sum <- sum_1  output['sum']
  out  user      output_scale <- 2.0  output['scale']
  out  mutation  new_b_counter_count <- {written}  counter.count of b_counter_count
  out  gradient  grad_p_counter_weight <- mul_5  counter.weight of p_counter_weight"""


def test_row_30_provenance_survives_every_form_of_a_program() -> None:
    """Every node keeps its origin when state changes form, in the flat module's graph and in the tree's."""
    row = case("shared_layer")
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs, backward=row.loss)
    known = {node.name: program.where(node) for node in program.graph.nodes if node.op == "call_function"}
    assert all(origin.quality != "none" for origin in known.values())
    for changed in (program.with_state("attributes"), program.with_state("attributes").with_state("inputs")):
        found = {node.name: changed.where(node) for node in changed.graph.nodes if node.op == "call_function"}
        assert found == known
    equal = {"block@2", "block@3"}  # share the graph of block@1 in the tree, and its nodes name that call
    for module, shared in ((program.module(), set()), (program.unflatten(), equal)):
        nodes = [node for graph in _graphs(module) for node in graph.nodes if "aten" in str(node.target)]
        seen = {program.where(node) for node in nodes}
        assert {origin.quality for origin in seen} == {"exact", "accumulated"}
        assert seen <= set(known.values())
        assert {str(call) for origin in seen for call in origin.calls} == {
            *("block.norm", "block.up", "block", "block.down", "head"),
            *(f"block{part}@{i}" for part in ("", ".norm", ".up", ".down") for i in range(1, 4)),
        } - shared
    again = whence.capture(program.module(), args, kwargs)
    assert set(operations(again.graph)) <= set(operations(program.graph))
    assert all(again.where(node).quality == "exact" for node in again.select("** :: aten.*"))


def _graphs(module: nn.Module) -> Iterator[fx.Graph]:
    calls = (call for child in module.modules() if isinstance(child, whence.Tree) for call in child.calls)
    graphs = (call.graph(phase) for call in calls for phase in (whence.Phase.FORWARD, whence.Phase.BACKWARD))
    return (graph for graph in graphs if graph is not None)


def test_row_31_source_lines_are_the_users() -> None:
    """Every operation, backward included, names the user's file, line and function; inputs name none."""

    class Lines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)  # linear
            x = self.helper(x)
            return torch.relu(x)  # relu

        def helper(self, x: Tensor) -> Tensor:
            return x.sin()  # sine

    program = whence.capture(Lines(), (torch.randn(2, 4),), backward=True)
    text, first = inspect.getsourcelines(Lines)
    marks = {"addmm": "linear", "sin": "sine", "relu": "relu", "cos": "sine", "mm": "linear"}
    for name, mark in marks.items():
        line = next(number for number, line in enumerate(text) if line.endswith(f"# {mark}\n"))
        source = program.where(name).source
        assert source is not None
        assert (source.file, source.line) == (__file__, first + line)
        assert source.function.endswith("Lines.helper" if mark == "sine" else "Lines.forward")
    for changed in (program, program.with_state("attributes")):
        for node in changed.graph.nodes:
            if node.op == "call_function" and changed.where(node).quality == "exact":
                assert changed.where(node).source is not None
            elif node.op in ("placeholder", "get_attr", "output"):
                assert changed.where(node).source is None
                assert "stack_trace" not in node.meta


def test_row_32_custom_metadata_stays_on_its_node() -> None:
    """What a person notes in a node's `custom` metadata stays there in every form, and on no other node."""
    block, x = Block(), torch.randn(3, 4)
    program = whence.capture(block, (x,), backward=True)
    program.node("tanh").meta["custom"] = {"stage": 1}
    attributes = program.with_state("attributes")
    for changed in (attributes, attributes.with_state("inputs")):
        marked = {node.name: node.meta["custom"] for node in changed.nodes() if "custom" in node.meta}
        assert marked == {"tanh": {"stage": 1}}
    for module in (program.module(), program.unflatten(), attributes.module()):
        noted = [(n.name, n.meta["custom"]) for g in _graphs(module) for n in g.nodes if "custom" in n.meta]
        assert noted == [("tanh", {"stage": 1})]
    assert program.verify(block, (x,)).ok


def test_row_33_torch_functions_are_noted() -> None:
    """Every forward operation notes the torch function that the user's code called, numbered by call."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.silu(self.first(x))
            x = self.second(x) + 1
            x.mul_(2)
            return torch.einsum("ij,kj->ik", x, x)

    program = whence.capture(Calls(), (torch.randn(2, 4),), backward=True)
    forward = [node for node in program.select("** :: * :: forward") if node.op == "call_function"]
    assert all("torch_fn" in node.meta for node in forward)
    noted = {node.name: node.meta["torch_fn"] for node in forward}
    assert noted["addmm"][1] == noted["addmm_1"][1] == "builtin_function_or_method.linear"
    assert noted["addmm"][0] != noted["addmm_1"][0]
    assert noted["t"] == noted["addmm"]
    assert noted["silu"][1] == "function.silu"
    assert noted["add"][1].endswith("add")
    [doubled] = program.select("** :: aten.mul :: forward")
    assert noted[doubled.name][1].endswith("mul_")
    assert noted["bmm"][1] == "function.einsum"
    with_attributes = program.with_state("attributes")
    assert all(with_attributes.node(name).meta["torch_fn"] == held for name, held in noted.items())


def test_row_34_parameter_names_that_are_no_identifiers() -> None:
    """Parameters whose names hold colons, dashes or keywords are found by name, run, train and are saved."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("weight:0", "weight-0", "class", "0", "übung"):
                self.register_parameter(name, nn.Parameter(torch.randn(4)))
            self.register_buffer("mean:0", torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            for name in ("weight:0", "weight-0", "class", "0", "übung"):
                x = torch.sin(x * getattr(self, name))
            return x + getattr(self, "mean:0")

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("odd:child", Odd())

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, "odd:child")(x)

    x = torch.randn(2, 4)
    for model, prefix in ((Odd(), ""), (Around(), "odd:child.")):
        for state in ("inputs", "attributes"):
            program = whence.capture(model, (x,), backward=True, state=state)
            row = program.input(f"{prefix}weight:0")
            assert program.state[row.name] is model.get_parameter(f"{prefix}weight:0")
            assert all(node.name.isidentifier() for node in program.graph.nodes)
            assert program.verify(model, (x,)).ok
            for module in (program.module(), program.unflatten()):
                assert torch.equal(module(x), model(x))
                assert list(module.state_dict()) == list(model.state_dict())


def test_row_35_inputs_are_ordered_and_lifted_once() -> None:
    """Inputs are parameters, buffers, constants, then the user's, each once; no attribute is read."""

    class Lifted(nn.Module):
        first: Tensor
        second: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.randn(4))
            self.table = torch.randn(4)
            self.alias = self.table
            self.one = nn.Linear(4, 4)
            self.two = self.one
            self.register_buffer("second", self.first)
            self.weight = self.one.weight
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.one(x) + self.two(y) + self.first * self.second + self.table * self.alias
            return self.blocks[1](self.blocks[0](x @ self.weight)) + torch.tensor([1.0, 2.0, 3.0, 4.0])

    model, x, y = Lifted(), torch.randn(3, 4), torch.randn(3, 4)
    program = whence.capture(model, (x, y), backward=True)
    kinds = [row.kind.value for row in program.signature.inputs]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        *("parameter", "buffer", "constant", "user", "tangent")
    ]
    assert [node.op for node in program.graph.nodes].count("get_attr") == 0
    assert len(names(program, "parameter")) == len(list(model.parameters()))
    assert len(names(program, "buffer")) == len(list(model.buffers()))
    assert len(names(program, "constant")) == 2
    assert set(program.input("first").aliases) == {"second"}
    assert set(program.input("weight").aliases) == {"one.weight", "two.weight"}
    assert len({id(tensor) for tensor in program.state.values()}) == len(program.state)
    assert program.verify(model, (x, y)).ok
    attributes = program.with_state("attributes")
    reads = [node.target for node in attributes.graph.nodes if node.op == "get_attr"]
    assert len(reads) == len(set(reads)) == len(program.state)
    assert [row.kind.value for row in attributes.signature.inputs] == ["user", "user", "tangent"]


def test_row_36_buffers_stay_as_persistent_as_they_were() -> None:
    """A buffer the model does not save is not saved by the flat module and the tree, in any form."""

    class Buffers(nn.Module):
        kept: Tensor
        loose: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2))
            self.register_buffer("loose", torch.ones(2), persistent=False)
            self.inner = nn.Module()
            self.inner.register_buffer("deep", torch.full((2,), 3.0), persistent=False)
            self.inner.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            deep = self.inner.deep
            assert isinstance(deep, Tensor)
            self.loose.add_(1)
            return x * self.loose + self.kept + deep

    model, x = Buffers(), torch.randn(2)
    for state in ("inputs", "attributes"):
        program = whence.capture(model, (x,), state=state)
        assert {row.path: row.persistent for row in program.signature.state} == {
            **{"kept": True, "loose": False, "inner.deep": False}
        }
        for module in (program.module(copy=True), program.unflatten(copy=True)):
            assert list(module.state_dict()) == list(model.state_dict()) == ["kept"]
            assert [name for name, _ in module.named_buffers()] == [name for name, _ in model.named_buffers()]
            result = module(x)
            assert equal(dict(module.named_buffers())["loose"], torch.full((2,), 2.0))
            assert torch.equal(result, x * 2 + 3)
            assert module.get_submodule("inner").nothing is None
    assert equal(model.loose, torch.ones(2))

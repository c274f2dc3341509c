"""What PyTorch's joint graphs pin down: rows 174 to 182, on programs with their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.traceback import annotate, annotate_fn, get_current_meta
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import whence
from tests.checks import differing, gradients, state
from whence import InputKind, OutputKind

X = torch.arange(8.0).reshape(2, 4) / 10
aten = torch.ops.aten


class Two(nn.Module):
    """A keyword, two results, a buffer that is written and a parameter that nothing uses."""

    calls_made: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls_made", torch.zeros(()))

    def forward(self, x: Tensor, *, bias: Tensor) -> dict[str, Tensor]:
        self.calls_made.add_(1)
        y = self.linear(x)
        return {"sum": y + bias, "product": y * bias}


def two() -> Two:
    torch.manual_seed(0)
    return Two()


def joint_of_two() -> whence.Program:
    bias = torch.ones(4, requires_grad=True)
    return whence.capture(two(), (X,), {"bias": bias}, backward=True)


def test_row_174_every_input_and_output_is_described() -> None:
    """Parameters and buffers by their names, arguments by access, tangents by result, gradients by input."""
    program = joint_of_two()
    inputs = {row.path: row.kind for row in program.signature.inputs if row.kind is not InputKind.TANGENT}
    assert inputs == {
        "unused": InputKind.PARAMETER,
        "linear.weight": InputKind.PARAMETER,
        "linear.bias": InputKind.PARAMETER,
        "calls_made": InputKind.BUFFER,
        "args[0]": InputKind.USER,
        "kwargs['bias']": InputKind.USER,
    }
    results = {row.name: row.path for row in program.signature.outputs_of(OutputKind.USER)}
    tangents = [results[row.of or ""] for row in program.signature.inputs_of(InputKind.TANGENT)]
    assert sorted(tangents) == sorted(results.values())
    gradients_of = {
        program.input(row.of or "").path: row.node
        for row in program.signature.outputs_of(OutputKind.GRADIENT)
    }
    assert {name for name, node in gradients_of.items() if node} == {
        "linear.weight",
        "linear.bias",
        "kwargs['bias']",
    }
    assert [
        program.input(row.of or "").path for row in program.signature.outputs_of(OutputKind.MUTATION)
    ] == ["calls_made"]


def test_row_175_structures_of_inputs_and_outputs() -> None:
    """The joint program is called with the keyword, and returns the dict."""
    tree, model = joint_of_two().unflatten(copy=True), two()
    bias, other = (torch.full((4,), 0.5, requires_grad=True) for _ in range(2))
    found, expected = tree(X, bias=bias), model(X, bias=other)
    assert list(found) == list(expected)
    for results in (found, expected):
        (results["sum"].sum() + results["product"].sin().sum()).backward()
    assert torch.equal(bias.grad, other.grad)  # type: ignore[arg-type]
    assert differing(gradients(model) | state(model), gradients(tree) | state(tree)) == []


def test_row_176_lists_of_nodes_agree() -> None:
    """The rows of each kind are the placeholders and the results of the graph, once each and in order."""
    program = joint_of_two()
    rows = [row.name for kind in InputKind for row in program.signature.inputs_of(kind)]
    placeholders = [node.name for node in program.graph.find_nodes(op="placeholder")]
    assert sorted(rows) == sorted(placeholders)
    assert [row.name for row in program.signature.inputs] == placeholders
    given = [row.node for kind in OutputKind for row in program.signature.outputs_of(kind) if row.node]
    returned = [node.name for node in program.graph.output_node().all_input_nodes]
    assert set(given) == set(returned)


def trained(run: Callable[..., Any], module: nn.Module) -> dict[str, Any]:
    """Losses, parameters and buffers after three steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = run(X).square().mean()
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses | state(module) | dict(module.named_parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at what it resumes with
def test_row_177_compiled_again_and_trained() -> None:
    """A joint tree under `torch.compile` trains as the eager model, and so does one captured from it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = trained(eager := deepcopy(model), eager)
    tree = whence.capture(model, (X,), backward=True).unflatten(copy=True)
    again = whence.capture(deepcopy(tree), (X,), backward=True).unflatten(copy=True)
    assert differing(expected, trained(torch.compile(tree, backend="aot_eager"), tree)) == []
    assert differing(expected, trained(again, again)) == []


class Says(nn.Module):
    """A function, a view and a module are annotated; the input is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"part": "view"}):
            turned = x.t().sin()
        with annotate({"part": "module"}):
            y = self.linear(x)
        return y + turned.sum()


def test_row_178_annotations_reach_the_backward() -> None:
    """The backward of an operation says what it says; sums of gradients say nothing."""
    program = whence.capture(Says(), (X.clone().requires_grad_(),), backward=True)
    said = {}
    for node in program.nodes():
        origin = program.where(node)
        if node.op == "call_function" and origin.phase is whence.Phase.BACKWARD:
            said[node.name] = node.meta.get("custom")
            if origin.quality is whence.Quality.ACCUMULATED:
                assert said[node.name] is None
            elif origin.forward is not None:
                assert said[node.name] == program.node(origin.forward).meta.get("custom")
    parts = {value["part"] for value in said.values() if value}
    assert parts == {"view", "module"}
    assert None in said.values()


@annotate_fn({"part": "function"})
def said_of(x: Tensor) -> Tensor:
    """A function of which something is said."""
    return x.cos()


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    """What is one operator when it is compiled."""
    return x.sin() * 2


class SaysMore(nn.Module):
    """A function, a region and a condition are annotated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"part": "region"}):
            y = region(self.linear(x))
        with annotate({"part": "condition"}):
            y = torch.cond(y.sum() > 0, lambda y: y.exp(), lambda y: y.tanh(), (y,))
        return said_of(y)


def test_row_178_annotations_of_functions_regions_and_branches() -> None:
    """What is said of a function or a region is said in its backward, and inside of branches, too."""
    program = whence.capture(SaysMore(), (X.clone().requires_grad_(),), backward=True)
    said = {
        (str(node.target), str(program.where(node).phase)): (node.meta.get("custom") or {}).get("part")
        for node in program.nodes()
        if node.op == "call_function" and program.where(node).quality is whence.Quality.EXACT
    }
    expected = {
        ("aten.mul.Tensor", "forward"): "region",
        ("aten.addmm.default", "forward"): "region",
        ("aten.mm.default", "backward"): "region",
        ("aten.exp.default", "forward"): "condition",
        ("aten.tanh.default", "forward"): "condition",
        ("cond", "forward"): "condition",
        ("cond", "backward"): "condition",
        ("aten.cos.default", "forward"): "function",
        ("aten.neg.default", "backward"): "function",
    }
    assert {key: said.get(key) for key in expected} == expected


def test_row_178_annotations_of_equal_layers_are_their_own() -> None:
    """Layers that differ in what is said of them alone do not take it from one another."""

    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for at, layer in enumerate(self.layers):
                if at < 3:
                    x = layer(x)
                else:
                    with annotate({"stage": at}):
                        x = layer(x)
            return x

    program = whence.capture(Staged(), (X,), backward=True)
    for at in range(6):
        said = {str(node.meta.get("custom")) for node in program.select(f"layers.{at}.**")}
        said |= {str(node.meta.get("custom")) for node in program.select(f"layers.{at}.0")}
        assert said == {str({"stage": at}) if at >= 3 else "None"}


@torch.library.custom_op("whence_joint::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator of the user's own."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _twice_backward(_ctx: Any, gradient: Tensor) -> Tensor:
    return twice(gradient)


twice.register_autograd(_twice_backward)


class Operates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x))


def test_row_179_lines_of_a_custom_operator() -> None:
    """On both sides an operator names the user's line, and parameters are the inputs that stay the same."""
    program = whence.capture(Operates(), (X,), backward=True)
    found = [node for node in program.nodes() if node.target is torch.ops.whence_joint.twice.default]
    sources = [program.where(node).source for node in found]
    functions = [source.function.rpartition(".")[2] for source in sources if source is not None]
    assert functions == ["forward", "_twice_backward"]
    assert {source.file for source in sources if source} == {__file__}
    first = [row.kind for row in program.signature.inputs][:2]
    assert first == [InputKind.PARAMETER, InputKind.PARAMETER]
    assert program.verify(Operates(), (X,)).ok


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="PyTorch differentiates flex attention on a GPU alone"
)
def test_row_180_annotations_of_flex_attention() -> None:
    """What is said of flex attention is said of its operator in the program."""

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with annotate({"part": "attention"}):
                return flex_attention(x, x, x)

    x = torch.randn(1, 2, 16, 16, device="cuda")
    program = whence.capture(Attends(), (x,))
    assert any((node.meta.get("custom") or {}).get("part") == "attention" for node in program.nodes())


class Net(nn.Module):
    """A convolution, running statistics, a buffer and an input that are written."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, image: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(image.shape[0])
        scratch.add_(1)
        y = self.head(self.norm(self.conv(image)).relu().flatten(1))
        return y.argmax(-1), y.square().mean() + scratch.sum()


@pytest.mark.parametrize("sizes", [None, ({0: Dim("batch", min=2)}, None)])
def test_row_181_joint_graph_of_a_network(sizes: Any) -> None:
    """A loss among the results, an open batch, statistics, a buffer and an input that are written."""
    torch.manual_seed(0)
    model = Net()
    program = whence.capture(
        model, (torch.randn(4, 1, 4, 4), torch.zeros(3)), backward=lambda out: out[1], dynamic_shapes=sizes
    )
    changed = [program.input(row.of or "").path for row in program.signature.outputs_of(OutputKind.MUTATION)]
    assert set(changed) == {
        "seen",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "args[1]",
    }
    given = [row.of for row in program.signature.outputs_of(OutputKind.GRADIENT)]
    assert [program.input(name or "").path for name in given] == [
        name for name, _ in model.named_parameters()
    ]
    for rows in (4,) if sizes is None else (4, 7):
        assert program.verify(model, (torch.randn(rows, 1, 4, 4), torch.zeros(3))).ok


def _policy(
    kept: Sequence[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """Keeps the product, and computes the rest again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def inner(self, x: Tensor) -> Tensor:
        return torch.mm(x.sin(), self.weight).cos()

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, [aten.mm.default]))
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return result.sum()


def test_row_182_selective_checkpoint() -> None:
    """The numbers are eager's, the policy is on the nodes, and nothing of it stays behind in the tracer.

    Under a tracer a selective checkpoint would keep all its values; here it keeps what it does in eager.
    """
    x = X.clone().requires_grad_()
    program = whence.capture(Selective(), (x,), backward=lambda loss: loss)
    told = {node.target: node.meta["recompute"] for node in program.nodes() if "recompute" in node.meta}
    assert told == {
        aten.sin.default: CheckpointPolicy.PREFER_RECOMPUTE,
        aten.mm.default: CheckpointPolicy.MUST_SAVE,
        aten.cos.default: CheckpointPolicy.PREFER_RECOMPUTE,
    }
    assert not [node for node in program.nodes() if "custom" in node.meta]
    assert program.verify(Selective(), (x,)).ok
    assert not {"recompute", "ac_graph_id"} & set(get_current_meta())
    tree, model = program.unflatten(copy=True), Selective()
    tree(x)[0].backward()
    model(x).backward()
    assert differing(gradients(model), gradients(tree)) == []


@pytest.mark.filterwarnings("ignore")
def test_row_182_policy_of_an_exported_checkpoint() -> None:
    """The strict front end exports it as an operator; the joint graph of what that gives has the policy."""
    x = X.clone().requires_grad_()
    exported = torch.export.export(Selective(), (x,), strict=True)
    module = exported.module()
    assert "tag_activation_checkpoint" in {str(node.target) for node in module.graph.nodes}
    program = whence.capture(module, (x,), backward=lambda loss: loss)
    told = {node.target: node.meta["recompute"] for node in program.nodes() if "recompute" in node.meta}
    assert told[aten.mm.default] is CheckpointPolicy.MUST_SAVE
    assert told[aten.sin.default] is CheckpointPolicy.PREFER_RECOMPUTE


def test_row_182_exported_checkpoint_is_no_wrapper() -> None:
    """What an exported checkpoint holds is part of the graph, and of the module that called it.

    The strict front end of PyTorch 2.13 exports none that has no policy.
    """

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.linear, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed()
    program = whence.from_exported_program(torch.export.export(model, (X,)))
    assert not [node for node in program.nodes() if "checkpoint" in str(node.target)]
    assert [str(call.site) for call in program.calls] == ["", "linear"]
    assert torch.equal(program.unflatten()(X), model(X))

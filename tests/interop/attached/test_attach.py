"""`whence.attach`: graphs of make_fx, of AOT autograd, of Dynamo, and traced training steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.traceback import annotate_fn, preserve_node_meta
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import differing, state
from tests.models import case
from whence import OutputKind, Phase, Quality

AS_COMPILED = partial(patch.object, torch.compiler, "_is_compiling_flag", True)
"""transformers looks at the values of masks otherwise."""
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Convolutions(nn.Module):
    """A buffer that is written in every step, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.same = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(image)))
        return self.head(self.same(self.same(hidden)).mean((2, 3)))


def convolutions() -> Case:
    torch.manual_seed(0)
    return Convolutions(), (torch.randn(2, 3, 6, 6),), {}


def transformer() -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 4, 8),), {}


def language(name: str) -> Callable[[], Case]:
    def make() -> Case:
        model, _, kwargs = case(name).make()
        return model, (), {"input_ids": kwargs["input_ids"], "use_cache": False, "return_dict": False}

    return make


MODELS = {"convolutions": convolutions, "transformer": transformer} | {
    n: language(n) for n in ("llama", "gpt2")
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def first(outputs: Any) -> Tensor:
    found: Tensor = tree_leaves(outputs)[0]
    return found


def loss_of(outputs: Any) -> Tensor:
    return first(outputs).float().sin().mean()


def trained(module: nn.Module, args: Any, kwargs: Any, *, has_loss: bool = False) -> dict[str, Any]:
    """The loss, the gradients and the state of one step, by the names of the model."""
    result = module(*args, **kwargs)
    loss = result[0] if has_loss else loss_of(result)
    loss.backward()
    named = {f"gradient {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named, **state(module)}


def trains_as_eager(program: whence.Program, made: Case, *, has_loss: bool = False, **changed: Any) -> None:
    """The tree and the flat module train bit for bit as the model does."""
    model, args, kwargs = made
    with AS_COMPILED():
        expected = trained(copy.deepcopy(model), args, kwargs)
    args, kwargs = changed.get("args", args), changed.get("kwargs", kwargs)
    for module in (program.unflatten(copy=True), program.module(copy=True)):
        assert differing(expected, trained(module, args, kwargs, has_loss=has_loss)) == []


def traced(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    with warnings.catch_warnings(), AS_COMPILED():
        warnings.simplefilter("ignore")
        graph = make_fx(function)(*args)
    assert isinstance(graph, fx.GraphModule)
    return graph


def gradients_of(loss: Tensor, parameters: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [p for p in parameters if p.requires_grad])


@pytest.mark.sample(2)
@EVERY_MODEL
def test_bare_step(name: str) -> None:
    """A step over a dict of parameters: state is known by identity, and trains as eager does."""
    model, args, kwargs = made = MODELS[name]()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = [*args, *(value for value in kwargs.values() if isinstance(value, Tensor))]

    def step(parameters: Any, buffers: Any, *tensors: Tensor) -> Any:
        given = dict(zip([k for k in kwargs if isinstance(kwargs[k], Tensor)], tensors, strict=False))
        positional = () if given else tensors
        out = functional_call(model, {**parameters, **buffers}, positional, {**kwargs, **given})
        return (loss := loss_of(out)), gradients_of(loss, parameters.values())

    untouched = state(model)
    graph = traced(step, parameters, buffers, *tensors)
    model.load_state_dict({n: untouched[n] for n in model.state_dict() if n in untouched}, strict=False)
    program = whence.attach(
        graph, model=model, args=(parameters, buffers, *tensors), outputs=["loss", "gradients"], loss=loss_of
    )
    assert len(program.signature.outputs_of(OutputKind.GRADIENT)) == len(parameters)
    assert {program.where(node).quality for node in program.select("**")} == {Quality.NONE}
    assert {str(call.site) for call in program.calls} == {""}
    assert program.select("** :: :: backward")
    trains_as_eager(program, made, has_loss=True, args=tuple(tensors), kwargs={})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "by_dynamo"),
    [
        pytest.param(name, way, marks=pytest.mark.slow if (name, way) == ("gpt2", True) else ())
        for name in MODELS
        for way in (False, True)
    ],
)
def test_joint_of_aot(name: str, by_dynamo: bool) -> None:
    """Descriptors say what is what; a graph that came through Dynamo also knows its modules."""
    model, args, kwargs = made = MODELS[name]()
    before = state(model)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = _dynamo_graph_capture_for_export(model)(*args, **kwargs) if by_dynamo else model
        with AS_COMPILED():
            joint = aot_export_joint_with_descriptors(stack, source, args, kwargs)
    assert differing(before, state(model)) == []
    program = whence.attach(joint, model=model, args=args, kwargs=kwargs)
    tangents = program.signature.inputs_of(whence.InputKind.TANGENT)
    assert {row.of for row in tangents} <= {row.name for row in program.signature.outputs}
    qualities = {(str(o.phase), str(o.quality)) for o in map(program.where, program.select("**"))}
    if by_dynamo:
        assert ("forward", "exact") in qualities and ("backward", "exact") not in qualities
        assert not any(quality == "none" for _, quality in qualities)
    else:
        assert {quality for _, quality in qualities} == {"none"}
    trains_as_eager(program, made)


def slow_unless(usual: bool) -> list[pytest.MarkDecorator]:
    return [] if usual else [pytest.mark.slow]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "front"),
    [
        pytest.param(
            name, front, marks=slow_unless(front == "capture" or MODELS[name] in (convolutions, transformer))
        )
        for name in MODELS
        for front in ("export", "capture", "compile")
    ],
)
def test_dynamo(name: str, front: str) -> None:
    """A graph of torch functions becomes one of operators, in the user's modules."""
    model, args, kwargs = made = MODELS[name]()
    graph = dynamo_graph(front, model, args, kwargs)
    program = whence.attach(graph, model=model, args=args, kwargs=kwargs)
    outside = {str(program.where(node).place) for node in program.graph.nodes if node.op == "call_function"}
    modules = {path for path, _ in model.named_modules()}
    assert {place.partition("@")[0] for place in outside} <= modules
    assert {program.where(n).quality for n in program.select("*.**")} <= {Quality.EXACT, Quality.INFERRED}
    assert not any("L_" in row.name or "L_" in row.path for row in program.signature.inputs)
    trains_as_eager(program, made)


def dynamo_graph(front: str, model: nn.Module, args: Any, kwargs: Any) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if front == "export":
            return torch._dynamo.export(model, aten_graph=False, assume_static_by_default=True)(
                *args, **kwargs
            )[0]
        if front == "capture":
            return _dynamo_graph_capture_for_export(model)(*args, **kwargs)
        seen: list[fx.GraphModule] = []

        def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            seen.append(graph)
            return graph.forward

        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        torch.compile(twin, backend=backend, fullgraph=True)(*args, **kwargs)
        return seen[0]


@pytest.mark.sample(2)
@EVERY_MODEL
def test_flat_state_first(name: str) -> None:
    """A step over one flat list, state first, with modules in annotations, as torchtitan traces its steps."""
    model, args, kwargs = made = MODELS[name]()
    tensors = [*args, *(value for value in kwargs.values() if isinstance(value, Tensor))]
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    values = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model)
    for path, module in twin.named_modules():
        if path:
            module.forward = annotate_fn({"module_fqn": path})(module.forward)

    def step(*flat: Tensor) -> Any:
        held, rest = dict(zip(names, flat, strict=False)), flat[len(names) :]
        given = dict(zip([k for k in kwargs if isinstance(kwargs[k], Tensor)], rest, strict=False))
        out = functional_call(twin, held, () if given else rest, {**kwargs, **given})
        parameters = [held[name] for name, _ in twin.named_parameters()]
        loss = loss_of(out)
        return [loss, *gradients_of(loss, parameters)]

    with preserve_node_meta():
        graph = traced(step, *(v.detach().clone().requires_grad_(v.requires_grad) for v in values), *tensors)
    program = whence.attach(graph, model=model, state_first=True, outputs=["loss", "gradients"])
    assert len(program.calls) > 1
    forward = [program.where(n) for n in program.select("*.** :: :: forward")]
    assert {origin.quality for origin in forward} == {Quality.INFERRED}
    trains_as_eager(program, made, has_loss=True, args=tuple(tensors), kwargs={})


def test_step_that_updates_parameters() -> None:
    """New parameters are mutations: running the program trains the model."""
    model, (image,), _ = convolutions()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def step(parameters: Any, buffers: Any, image: Tensor) -> Any:
        out = functional_call(model, {**parameters, **{n: b.clone() for n, b in buffers.items()}}, (image,))
        loss = loss_of(out)
        grads = torch.autograd.grad(loss, list(parameters.values()))
        return loss, [p - 0.1 * g for p, g in zip(parameters.values(), grads, strict=True)]

    graph = traced(step, parameters, buffers, image)
    program = whence.attach(
        graph, model=model, args=(parameters, buffers, image), outputs=["loss", "new parameters"]
    )
    assert {row.of for row in program.signature.outputs_of(OutputKind.MUTATION)} == {
        row.name for row in program.signature.inputs_of(whence.InputKind.PARAMETER)
    }
    twin = copy.deepcopy(model)
    loss_of(twin(image)).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    for module in (program.module(copy=True), program.unflatten(copy=True)):
        module(image)
        found = dict(module.named_parameters())
        assert all(torch.equal(p, found[n]) for n, p in twin.named_parameters())


def test_words_for_inputs_and_outputs() -> None:
    """Every input and output can be named; names are how they are found."""
    model = nn.Linear(3, 2)

    def step(bias: Tensor, features: Tensor, weight: Tensor) -> Any:
        out = nn.functional.linear(features, weight, bias)
        loss = out.sum()
        return out, torch.autograd.grad(loss, weight)[0], loss

    bias, weight = model.bias, model.weight
    graph = traced(step, bias, torch.randn(4, 3), weight)
    program = whence.attach(
        graph,
        model=model,
        inputs=["bias", "features", "weight"],
        outputs=["logits", "gradient of weight", "loss"],
    )
    assert [row.path for row in program.signature.inputs] == ["weight", "bias", "args[0]"]
    assert program.input("features").name == "features"
    assert program.output("grad_p_weight").of == "p_weight"
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(program.module()(x)[1], model(x))
    with pytest.raises(whence.CallError, match="does not compute their gradients"):
        program.module()(x)  # the graph returns no gradient of the bias


def test_nothing_is_said_of_an_output() -> None:
    """None stands for a result, and for what the graph returns as None."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def step(features: Tensor) -> Any:
        out = model(features)
        return out, None, out.sum()

    graph = traced(step, x)
    program = whence.attach(graph, model=model, outputs=[None, None, "loss"])
    assert [row.kind for row in program.signature.outputs] == [OutputKind.LOSS, OutputKind.USER]
    with torch.no_grad():
        assert torch.equal(program.module()(x)[1], model(x))


def test_backward_graph_of_aot() -> None:
    """Its gradients belong to what it does not take, and that is said; as results they are returned."""
    held: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _examples: object) -> Any:
        held.append(graph)
        return make_boxed_func(graph.forward)

    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    run = aot_function(lambda held, x: functional_call(model, held, (x,)), keep, keep)
    run(dict(model.named_parameters()), x).sum().backward()
    words = ["gradient of weight", "gradient of bias"]
    with pytest.raises(whence.UnsupportedGraph, match="belongs to weight, which is no input"):
        whence.attach(held[1], model=model, outputs=[*words, None])
    with pytest.raises(whence.UnsupportedGraph, match="names 2 outputs, and the graph returns 3"):
        whence.attach(held[1], model=model, outputs=words)
    program = whence.attach(held[1], model=model, outputs=["output", "output", None])
    assert [row.kind for row in program.signature.outputs] == [OutputKind.USER] * 2


@pytest.mark.parametrize(
    "words", ["loss", 3, {"loss": 1}, [3, "loss"], ["loss", ["gradients"]], ["x", "loss"]]
)
def test_words_that_are_none(words: Any) -> None:
    """What is no word for an output or an input is refused by name."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    graph = traced(
        lambda held, x: functional_call(model, held, (x,)).sum(), dict(model.named_parameters()), x
    )
    for said in ({"outputs": words}, {"inputs": words}):
        with pytest.raises(whence.UnsupportedGraph, match=f"{next(iter(said))} (is|holds|names)"):
            whence.attach(graph, model=model, **said)


class TestBadInput:
    """Everything that does not fit is named at once."""

    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    x = torch.randn(4, 3)

    def graph(self) -> fx.GraphModule:
        names = [*dict(self.model.named_parameters()), *dict(self.model.named_buffers())]

        def forward(*flat: Tensor) -> Any:
            return functional_call(self.model, dict(zip(names, flat, strict=False)), (flat[-1],))

        values = [v.detach().clone() for v in (*self.model.parameters(), *self.model.buffers())]
        return traced(forward, *values, self.x)

    def refused(self, message: str, graph: object = None, **options: Any) -> whence.UnsupportedGraph:
        with pytest.raises(whence.UnsupportedGraph, match=message) as caught:
            whence.attach(self.graph() if graph is None else graph, model=self.model, **options)
        return caught.value

    def test_nothing_is_said(self) -> None:
        """Of a bare graph nothing is guessed: every input is named, and shown in the graph."""
        error = self.refused("it is not known what the input")
        assert len(error.faults) == 8
        assert "= placeholder\n      ^ it is not known what the input" in str(error)

    def test_too_few_words(self) -> None:
        """The number of words is the number of inputs, and of outputs."""
        error = self.refused("inputs names 1 inputs, and the graph has 8", inputs=["x"], outputs=["a", "b"])
        assert "outputs names 2 outputs, and the graph returns 1" in str(error)

    def test_state_in_another_order(self) -> None:
        """A tensor that has another shape than the model's is named, with both."""
        names = ["0.bias", "0.weight", "1.weight", "1.bias"]
        rest = ["1.running_mean", "1.running_var", "1.num_batches_tracked", "x"]
        error = self.refused(r"is f32\[2, 3\], and 0.bias is f32\[2\]", inputs=[*names, *rest])
        assert r"is f32[2], and 0.weight is f32[2, 3]" in str(error)

    def test_another_model(self) -> None:
        """The state of another model does not fit."""
        with pytest.raises(whence.UnsupportedGraph, match=r"and 0.weight is f32\[5, 3\]"):
            whence.attach(
                self.graph(), model=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), state_first=True
            )

    def test_state_given_twice(self) -> None:
        """One word for two inputs is refused."""
        names = ["0.weight", "0.bias", "0.bias", "1.bias"]
        rest = ["1.running_mean", "1.running_var", "1.num_batches_tracked", "x"]
        self.refused("several inputs are said to be 0.bias", inputs=[*names, *rest])

    def test_outputs_that_do_not_fit(self) -> None:
        """A loss is a number; a gradient has the shape of its parameter; what it belongs to exists."""
        self.refused(r"'loss' is f32\[4, 2\], not one number", state_first=True, outputs=["loss"])
        self.refused(r"'gradient of 0.bias' is f32\[4, 2\]", state_first=True, outputs=["gradient of 0.bias"])
        self.refused("belongs to nowhere, which is no input", state_first=True, outputs=["new nowhere"])

    def test_arguments_that_do_not_fit(self) -> None:
        """As many arguments as the graph takes."""
        self.refused("args and kwargs hold 2 tensors", args=(self.x, self.x))

    def test_contradictory_scopes(self) -> None:
        """A module that the model does not have, or of another class, is named at its nodes."""
        graph = self.graph()
        addmm, norm, *_ = (
            node for node in graph.graph.nodes if node.op == "call_function" and node.name != "t"
        )
        addmm.meta["nn_module_stack"] = {"0": ("0", nn.Conv2d)}
        norm.meta["nn_module_stack"] = {"1": ("nowhere.9", nn.BatchNorm1d)}
        error = self.refused("0 is a Conv2d to addmm, and a Linear in the model", graph, state_first=True)
        assert f"{norm.name} comes from nowhere" in str(error)
        assert f"\n      ^ {norm.name} comes from nowhere.9" in str(error)

    def test_no_graph(self) -> None:
        """Something else is refused by its type."""
        self.refused("expected a torch.fx.GraphModule or a JointWithDescriptors, got int", graph=3)

    def test_graph_without_output(self) -> None:
        """A graph must return something."""
        graph = self.graph()
        graph.graph.erase_node(next(iter(reversed(graph.graph.nodes))))
        self.refused("the graph returns nothing", graph=graph)


def test_descriptor_of_something_else() -> None:
    """A descriptor that names what the model does not have is refused."""
    model, args, _ = convolutions()
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, args)
    with pytest.raises(whence.UnsupportedGraph, match="which the model does not have") as caught:
        whence.attach(joint, model=nn.Linear(2, 2))
    assert len(caught.value.faults) > 5


def test_graph_is_left_alone() -> None:
    """The graph that was given is not written on."""
    model, args, kwargs = convolutions()
    graph = dynamo_graph("capture", model, args, kwargs)
    before = [(str(node), dict(node.meta)) for node in graph.graph.nodes]
    program = whence.attach(graph, model=model, args=args)
    assert [(str(node), dict(node.meta)) for node in graph.graph.nodes] == before
    origin = program.where(program.select("** :: aten.relu")[0])
    assert origin.phase is Phase.FORWARD and origin.source is not None
    assert origin.source.file == __file__


class Decides(nn.Module):
    """Reads sizes, and computes something else for short rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).relu()
        if x.shape[1] > 3:
            hidden = hidden * 2
        return self.head(hidden.view(-1, 4)).reshape(x.shape[0], -1)


def loss_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    result = model(x)
    result = result[0] if isinstance(result, tuple) else result
    loss = result if result.ndim == 0 else result.sin().sum()
    loss.backward()
    return [loss.detach(), *(held.grad for held in model.parameters() if held.grad is not None)]


def symbolic_forward(model: nn.Module, x: Tensor) -> Any:
    """What make_fx makes of a forward with symbolic sizes."""
    state = dict(model.named_parameters())
    graph = make_fx(lambda state, x: functional_call(model, state, (x,)), tracing_mode="symbolic")(state, x)
    return whence.attach(graph, model=model, args=(state, x))


def symbolic_step(model: nn.Module, x: Tensor) -> Any:
    """What make_fx makes of a step of training with symbolic sizes."""
    state = dict(model.named_parameters())

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        loss = functional_call(model, state, (x,)).sin().sum()
        return loss, torch.autograd.grad(loss, [*state.values()])

    graph = make_fx(step, tracing_mode="symbolic")(state, x)
    return whence.attach(graph, model=model, args=(state, x), outputs=["loss", "gradients"])


def symbolic_joint(model: nn.Module, x: Tensor) -> Any:
    """AOT autograd's joint graph with symbolic sizes."""
    mode, open_, fixed = FakeTensorMode(shape_env=ShapeEnv()), DimDynamic.DYNAMIC, DimDynamic.STATIC
    context: Any = StatelessSymbolicContext([open_, open_, fixed])
    mode.allow_non_fake_inputs = True
    with ExitStack() as stack, mode:
        fake = mode.from_tensor(x, symbolic_context=context)
        joint = aot_export_joint_with_descriptors(stack, model, (fake,))
    return whence.attach(joint, model=model, args=(x,))


def symbolic_dynamo(model: nn.Module, x: Tensor) -> Any:
    """What Dynamo captured with two dimensions marked as dynamic."""
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    return whence.attach(dynamo_graph("capture", model, (x,), {}), model=model, args=(x,))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "read", [symbolic_forward, symbolic_step, symbolic_joint, symbolic_dynamo], ids=lambda read: read.__name__
)
def test_sizes_that_vary(read: Callable[[nn.Module, Tensor], whence.Program]) -> None:
    """At every admitted size the numbers are eager's; where the tracer assumed otherwise, it is refused."""
    torch.manual_seed(0)
    model = Decides()
    program = read(model, torch.randn(3, 5, 4))
    modules = (program.unflatten(copy=True), program.module(copy=True))
    assert "args[0]" in str(program.shapes)
    for rows, length in ((3, 5), (6, 7), (2, 8)):
        x = torch.randn(rows, length, 4)
        expected = loss_and_gradients(model, x)
        for module in modules:
            assert all(map(torch.equal, loss_and_gradients(module, x), expected))
    for module in modules:
        with pytest.raises(whence.CallError, match=r"dim 1 of `args\[0\]` is 3, and must be at least 4"):
            module(torch.randn(3, 3, 4))
        with pytest.raises(whence.CallError):
            module(torch.randn(3, 5, 5))
        with pytest.raises(whence.CallError, match="must be at least 2"):
            module(torch.randn(1, 5, 4))


def test_sizes_that_were_one_at_the_trace() -> None:
    """A tracer calls equal sizes by one name: then they must be equal; a weight's size stays the weight's."""
    model = nn.Linear(4, 4)
    state = dict(model.named_parameters())

    def both(state: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(model, state, (x,)) + y.sum()

    given = (torch.randn(3, 4), torch.randn(3))
    graph = make_fx(both, tracing_mode="symbolic")(state, *given)
    tree = whence.attach(graph, model=model, args=(state, *given)).unflatten()
    x, y = torch.randn(5, 4), torch.randn(5)
    assert torch.equal(tree(x, y), model(x) + y.sum())
    for other in ((x, y[:4]), (x[:, :3], y)):
        with pytest.raises(whence.CallError):
            tree(*other)


def test_sizes_of_data_are_refused() -> None:
    """A graph whose sizes depend on the values of tensors is refused."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def chosen(x: Tensor) -> Tensor:
        count: Any = x.sum().int().item()
        torch._check(count > 2)
        return x[0].expand(count, 3)

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True))
    fake = mode.from_tensor(
        x, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    )
    graph = make_fx(chosen, tracing_mode="symbolic")(fake)
    with pytest.raises(whence.UnsupportedGraph, match="depend on the values"):
        whence.attach(graph, model=model, args=(x,))


def test_gradients_of_another_loss_are_refused() -> None:
    """Where the backward begins must be seen; it is not guessed."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def step(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
        out = nn.functional.linear(x, weight, bias)
        return out.sum(), torch.autograd.grad(out.sum(), (weight, bias))

    graph = traced(step, model.weight, model.bias, x)
    with pytest.raises(whence.UnsupportedGraph, match="not known where its backward begins"):
        whence.attach(graph, model=model, state_first=True, outputs=["loss", "gradients"])

"""Tensors that are made of other tensors: parameters, buffers, attributes, arguments and results."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.export import Dim
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import whence
from tests.tracing.quantised import Int8Weight, quantised

X = torch.randn(3, 4)
JOINT = pytest.mark.parametrize("backward", [False, True])


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(*shape), torch.randn(*shape))


def doubled(model: nn.Module) -> nn.Module:
    """The model with parameters of two tensors."""
    for layer in model.modules():
        for name, held in list(layer._parameters.items()):
            if held is not None:
                layer.register_parameter(name, nn.Parameter(two(*held.shape)))
    return model


class Net(nn.Module):
    """Two layers, a buffer that counts and a constant, all of them of two tensors."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = doubled(nn.Linear(4, 8)), doubled(nn.Linear(8, 4))
        self.register_buffer("steps", two(4))
        self.constant = two(4)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        self.steps.add_(1)
        hidden = self.down(torch.relu(self.up(x)))
        return {"hidden": hidden * self.steps + scale * self.constant, "scale": scale}


def part(program: whence.Program, name: str) -> whence.Part:
    """The part that an input or output is, by its path."""
    row: Any = program.output(name) if name.startswith("output") else program.input(name)
    assert isinstance(row.part, whence.Part)
    return row.part


def parts_of(tensor: Any) -> list[Tensor]:
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    held = [getattr(tensor, name) for name in names]
    return [part for value in held if isinstance(value, Tensor) for part in parts_of(value)] or [tensor]


def same(left: Any, right: Any) -> bool:
    """Whether tensors are of one class, and what they are made of is equal bit for bit."""
    if type(left) is not type(right) or left is None:
        return left is right
    return all(map(torch.equal, parts_of(left), parts_of(right)))


def gradients(model: nn.Module, run: Callable[[], Tensor], tangent: Any = None) -> dict[str, Any]:
    """What is left in `.grad` by the backward of what `run` gives."""
    model.zero_grad()
    run().backward(tangent)
    found = {name: held.grad for name, held in model.named_parameters()}
    model.zero_grad()
    return found


@JOINT
def test_everything_of_two_tensors(backward: bool) -> None:
    """Parameters, buffers, constants, arguments and results; the program has what they are made of."""
    model, inputs = Net(), (two(3, 4).requires_grad_(),)
    kwargs = {"scale": two(3, 4)}
    program = whence.capture(model, inputs, kwargs, backward=backward)
    assert program.verify(model, inputs, kwargs).ok
    assert program.check(model, inputs, kwargs) == []
    assert {type(row.value) for row in program.signature.inputs} == {type(program.input("x_a").value)}
    model.steps.zero_()
    expected = model(*inputs, **kwargs)
    model.steps.zero_()
    given = program.unflatten()(*inputs, **kwargs)
    assert same(given["hidden"], expected["hidden"]) and same(given["scale"], kwargs["scale"])


def test_the_signature_says_what_is_what() -> None:
    """The row of a part names the whole, its class and the attribute; the page prints that."""
    program = whence.capture(Net(), (X,), {"scale": two(3, 4)}, backward=True)
    row = program.input("up.weight.b")
    assert (row.name, row.part) == (
        "p_up_weight_b",
        whence.Part("up.weight", "TwoTensor", "b", requires_grad=True),
    )
    assert "p_up_weight_b: f32[8, 4]  up.weight.b (b of the TwoTensor up.weight)" in str(program)
    assert program.input("kwargs['scale'].a").name == "scale_a"
    assert part(program, "output['hidden'].a").whole == "output['hidden']"
    assert program.output("grad_p_up_weight_b").of == row.name
    tangents = program.signature.inputs_of(whence.InputKind.TANGENT)
    assert [tangent.part.access for tangent in tangents if tangent.part] == ["a", "b"]
    with pytest.raises(whence.SelectionError, match="p_up_weight_a, p_up_weight_b"):
        program.input("up.weight")
    assert "nothing is replayed where tensors are made of others" in str(program.replay)


@pytest.mark.parametrize("make", ["module", "unflatten"])
def test_gradients_of_composed_parameters(make: str) -> None:
    """`.grad` is of eager's class and has its numbers, and an optimizer takes a step with it."""
    model, tangent = nn.Sequential(doubled(nn.Linear(4, 8)), nn.ReLU(), doubled(nn.Linear(8, 4))), two(3, 4)
    program = whence.capture(model, (X,), backward=True)
    captured = getattr(program, make)()
    eager = gradients(model, lambda: model(X), tangent)
    found = gradients(model, lambda: captured(X), tangent)
    assert all(same(found[name], eager[name]) for name in eager)
    captured(X).backward(tangent)
    torch.optim.SGD(captured.parameters(), lr=0.1).step()
    assert program.verify(model, (X,)).ok


class Attends(nn.Module):
    """What attention does with its weights, in a layer that keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.out = (
            doubled(layer) for layer in (nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
        )

    def forward(self, x: Tensor) -> Any:
        hidden = self.query(self.norm(x))
        return x + self.out(torch.softmax(hidden @ hidden.transpose(-1, -2), -1) @ hidden)


def test_layers_of_a_tree_that_was_copied() -> None:
    """Sums of gradients, saved views and residuals: all of the tree, and a layer of it alone."""
    model, x, tangent = nn.Sequential(Attends(), Attends()), two(2, 3, 4).requires_grad_(), two(2, 3, 4)
    program = whence.capture(model, (x,), backward=True)
    assert program.verify(model, (x,)).ok
    tree: Any = program.unflatten(copy=True)
    for own, other in ((model, tree), (model[1], tree.get_submodule("1"))):
        eager = gradients(own, partial(own, x), tangent)
        found = gradients(other, partial(other, x), tangent)
        assert eager and all(same(found[name], eager[name]) for name in eager)
    tree.load_state_dict(model.state_dict())
    assert same(tree(x).detach(), model(x).detach())


def test_a_module_inside_alone() -> None:
    """A module of the tree takes composed tensors, too, and gives their gradients."""
    model = nn.Sequential(doubled(nn.Linear(4, 8)), nn.ReLU(), doubled(nn.Linear(8, 4)))
    tree: Any = whence.capture(model, (X,), backward=True).unflatten()
    hidden, again = two(3, 8), two(3, 8)
    hidden.requires_grad_()
    result = tree.get_submodule("2")(hidden)
    assert same(result.detach(), model[2](hidden).detach())
    result.backward(tangent := two(3, 4))
    found, hidden.grad = hidden.grad, None
    model[2](hidden).backward(tangent)
    assert same(found, hidden.grad) and not same(found, again)


@JOINT
def test_nested(backward: bool) -> None:
    """A tensor of tensors of tensors; one that is passed twice is one."""

    def double(x: Tensor, y: Tensor) -> Any:
        return x.softmax(-1) * y + x

    nested: Any = TwoTensor(two(3, 4), two(3, 4)).requires_grad_()
    program = whence.capture(double, (nested, nested), backward=backward)
    assert program.verify(double, (nested, nested)).ok
    assert isinstance(program.module()(nested, nested).b, TwoTensor)
    assert part(program, "args[0].b.a").access == "b.a"
    with pytest.raises(whence.CallError, match=r"args\[0\]\.a\.a and args\[1\]\.a\.a were one tensor"):
        program.module()(nested, TwoTensor(two(3, 4), two(3, 4)))


def test_sizes_that_vary() -> None:
    """A result that is made of others has the size of the call."""
    model = doubled(nn.Linear(4, 5))
    program = whence.capture(model, (X,), dynamic_shapes=({0: Dim("rows")},))
    for rows in (1, 3, 7):
        given = program.module()(torch.ones(rows, 4))
        assert given.shape == (rows, 5) and same(given.detach(), model(torch.ones(rows, 4)).detach())


@pytest.mark.sweep
def test_quantised_llama() -> None:
    """Eight-bit weights in a transformers model: forward, joint, at other sizes; guards see the weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50
    )
    model = quantised(transformers.LlamaForCausalLM(config).eval())
    inputs = {"input_ids": torch.randint(0, 50, (2, 6)), "use_cache": False}
    program = whence.capture(model, (), inputs)
    row = program.input("model.layers.0.self_attn.q_proj.weight.numbers")
    assert row.value.dtype is torch.int8 and row.part and row.part.type == "Int8Weight"
    assert program.verify(model, (), inputs).ok and program.check(model, (), inputs) == []
    assert torch.equal(program.unflatten()(**inputs).logits, model(**inputs).logits)
    shapes = {"input_ids": {0: Dim("rows"), 1: Dim("length")}, "use_cache": None}
    joint = whence.capture(model, (), inputs, backward=lambda out: out.logits.sum(), dynamic_shapes=shapes)
    for rows, length in ((2, 6), (2, 3), (4, 9)):
        assert joint.verify(model, (), {**inputs, "input_ids": torch.ones(rows, length).long()}).ok
    layer: Any = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.weight.original = torch.float64
    (violation,) = program.check(model, (), inputs)
    assert violation.guard.what == "model.layers.1.mlp.up_proj.weight" and "float64" in violation.found
    layer.weight = nn.Parameter(layer.weight.whole().detach())
    (violation,) = program.check(model, (), inputs)
    assert violation.found.startswith("Parameter")


# --- distributed -------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


@JOINT
def test_distributed_parameters_arguments_and_results(mesh: Any, backward: bool) -> None:
    """The program has the local tensors; results are distributed as eager's are."""
    model: Any = net()
    for layer in (model[0], model[2]):
        for name, held in list(layer._parameters.items()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(held.detach(), mesh, [Shard(0)])))
    x = distribute_tensor(X, mesh, [Replicate()])
    program = whence.capture(model, (x,), backward=backward)
    assert program.verify(model, (x,)).ok and program.check(model, (x,)) == []
    result = program.unflatten()(x)
    assert isinstance(result, DTensor) and result.placements == model(x).placements
    part = whence.Part("0.weight", "DTensor", "_local_tensor", True, (("0", 1),), (repr(Shard(0)),))
    assert program.input("0.weight").part == part
    assert str(part).endswith("the DTensor 0.weight, Shard(dim=0) over 1")
    spread = program.signature.outputs[0].part
    assert spread is not None and spread.placements == tuple(map(repr, result.placements))
    with pytest.raises(whence.CallError, match="another structure"):
        program.module()(distribute_tensor(X, mesh, [Shard(0)]))
    model[0].weight = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Replicate()]))
    (violation,) = program.check(model, (x,))
    assert violation.guard.what == "0.weight" and "Replicate" in violation.found


@pytest.mark.parametrize("make", ["module", "unflatten"])
def test_tensor_parallel(mesh: Any, make: str) -> None:
    """Plain inputs, parameters placed by a plan: gradients are placed as eager's are."""
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    program = whence.capture(model, (X,), backward=lambda out: out.pow(2).sum())
    assert program.verify(model, (X,)).ok
    captured = getattr(program, make)()
    eager = gradients(model, lambda: model(X).pow(2).sum())
    found = gradients(model, lambda: captured(X)[0])
    assert all(same(found[name], eager[name]) for name in eager)
    assert all(found[name].placements == eager[name].placements for name in eager)


# --- refused -----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Any:
        return x * self.weight


class Logged(Tensor):
    """Sees every function, and says nothing of what it is made."""


class Shut(Tensor):
    """Sees every operation, and says nothing of what it is made."""

    @staticmethod
    def __new__(cls: type, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


class Fresh(TwoTensor):
    """Makes its parts anew each time."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found.clone() if name == "a" else found


@pytest.mark.parametrize(
    ("tensor", "kind", "why", "remedy"),
    [
        (X.as_subclass(Logged), "Logged", "go through its class (__torch_function__", "as_subclass"),
        (Shut(X), "Shut", "__torch_dispatch__", "__tensor_flatten__"),
        (X.to_sparse(), "sparse_coo tensor", "indices", "to_dense"),
        (Fresh(X, X), "Fresh", "another tensor each time", "keep it as an attribute"),
        (
            torch.nested.nested_tensor([X, X], layout=torch.jagged),
            "NestedTensor",
            "a length of its own for each row",
            "to_padded_tensor",
        ),
    ],
)
def test_what_cannot_be_seen_through(tensor: Tensor, kind: str, why: str, remedy: str) -> None:
    """As an argument and as an attribute: the path, the class, the reason and the remedy."""
    for model, inputs, path in (
        (nn.ReLU(), (tensor,), "args[0]"),
        (nn.Sequential(Scaled(tensor)), (X,), "0.weight"),
    ):
        with pytest.raises(whence.UnsupportedInput) as caught:
            whence.capture(model, inputs)
        assert caught.value.what == f"{path} is a {kind}"
        assert why in caught.value.why and remedy in caught.value.remedy


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_old_layout() -> None:
    """They are named as what they are."""
    with pytest.raises(whence.UnsupportedInput, match=r"args\[0\] is a nested tensor"):
        whence.capture(nn.ReLU(), (torch.nested.nested_tensor([X, X]),))


def test_gradients_of_another_kind() -> None:
    """A plain parameter whose gradient is composed, and a composed one whose gradient is plain."""
    with pytest.raises(
        whence.UnsupportedInput, match="the gradient of the parameter bias, a plain tensor, is"
    ):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(two(4, 4))
        whence.capture(model, (X,), backward=True)

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Int8Weight.of(torch.randn(4, 4)))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    with pytest.raises(whence.UnsupportedInput, match="a Int8Weight, is a plain tensor"):
        whence.capture(Trained(), (X,), backward=True)


def test_a_composed_tensor_from_outside() -> None:
    """One that a function closes over is a constant; one that requires a gradient is refused."""
    outside: Any = two(4)
    program = whence.capture(lambda x: x * outside, (X,))
    assert same(program.module()(X), X * outside)
    outside.requires_grad_()
    with pytest.raises(whence.UnsupportedInput, match="neither an input nor a parameter"):
        whence.capture(lambda x: x * outside, (X,))


def test_a_composed_loss() -> None:
    """The backward begins at one number."""
    with pytest.raises(whence.InvalidLoss, match="the loss is a TwoTensor"):
        whence.capture(doubled(nn.Linear(4, 4)), (X,), backward=lambda out: out.sum())


def test_a_forward_alone_is_not_differentiated() -> None:
    """What a class does with its parts is not how autograd differentiates it: a forward program refuses."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Int8Weight.of(torch.randn(4, 4)), requires_grad=False)
    result = whence.capture(model, (X,)).module()(X)
    with pytest.raises(whence.NotDifferentiable, match="operations of tensors that are made of others"):
        result.sum().backward()


def test_composed_sizes_cannot_be_asked_for() -> None:
    """The size of a part is not one of the whole."""
    with pytest.raises(whence.InvalidShapes, match=r"dim 0 of `args\[0\]\.a` is to vary"):
        whence.capture(nn.ReLU(), (two(4, 4),), dynamic_shapes=([{0: Dim("rows")}, None],))


class Longer(TwoTensor):
    """Twice as long as what it is made of."""

    @staticmethod
    def __new__(cls: type, a: Tensor, b: Tensor) -> Any:
        shape = (2 * a.shape[0], *a.shape[1:])
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, shape, strides=a.stride(), dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        changed = cls(func(args[0].a), func(args[0].b))
        return return_and_correct_aliasing(func, args, kwargs or {}, changed)


def test_a_size_that_no_part_has() -> None:
    """Nobody could say in a run how large the result is."""
    with pytest.raises(whence.UnsupportedInput, match="returned a Longer with a size that varies"):
        whence.capture(lambda x: Longer(x, x), (X,), dynamic_shapes={"x": {0: Dim("rows")}})


def test_a_gradient_made_otherwise(mesh: Any) -> None:
    """A tangent of other placements than the result is refused, not misread."""
    x = distribute_tensor(X, mesh, [Replicate()]).requires_grad_()
    module = whence.capture(nn.ReLU(), (x,), backward=True).module()
    with pytest.raises(whence.NotDifferentiable, match="the gradient of a DTensor arrived as"):
        module(x).backward(distribute_tensor(X, mesh, [Shard(0)]))


def test_it_cannot_be_exported() -> None:
    """An exported program takes tensors as they are: each is named."""
    with pytest.raises(whence.NotExportable, match="weight is a TwoTensor, bias is a TwoTensor, output is"):
        whence.capture(doubled(nn.Linear(4, 4)), (X,)).to_exported_program()


class Loud(torch.Tensor):
    """A class that looks at torch functions, and is not made of other tensors."""


@pytest.mark.parametrize(
    ("body", "backward"),
    [
        (lambda x: x.as_subclass(Tensor) * 2, False),
        (lambda x: x.as_subclass(Tensor) * 2, True),
        (lambda x: Tensor._make_subclass(Tensor, x) * 2, False),
    ],
    ids=["forward", "joint", "made"],
)
def test_another_plain_tensor_made_past_the_dispatcher_is_refused(body: Any, backward: bool) -> None:
    """The program would have a fake tensor as a constant."""
    with pytest.raises(whence.UnsupportedOperator, match="in a way that no capture sees") as caught:
        whence.capture(body, (torch.ones(2, requires_grad=True),), backward=backward)
    assert "view_as" in str(caught.value) and __file__ in str(caught.value)


def test_a_tensor_that_is_given_another_class() -> None:
    """`as_subclass` inside a model is refused, with the line and what to use."""
    with pytest.raises(whence.UnsupportedOperator, match="as_subclass") as caught:
        whence.capture(lambda x: x.sin().as_subclass(Loud), (torch.ones(2),))
    assert caught.value.where.line is not None and "plain tensor" in caught.value.remedy

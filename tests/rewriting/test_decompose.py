"""`program.decompose`: lower operators, with what is known of them."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim

import whence
from tests.models import case
from tests.program.small import sine_loss
from whence import Phase

aten = torch.ops.aten
X = torch.randn(2, 4)


class Branching(nn.Module):
    """Composites inside of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        def one(y: Tensor) -> Tensor:
            return self.norm(self.linear(y))

        found: Tensor = torch.cond(x.sum() > 0, one, lambda y: F.gelu(self.linear(y)), (x,))
        return found


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attention(x, x, x, need_weights=False)[0]).reshape(-1, 8)


def targets(program: whence.Program) -> Counter[str]:
    return Counter(str(node.target) for node in program.nodes() if node.op == "call_function")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt2_dropout", "bert", "vit", "mixtral", "mamba"])
def test_composites_are_taken_apart_bit_for_bit(name: str) -> None:
    """In the grad mode of the moment: outputs, gradients, buffers and random numbers are eager's."""
    model, args, kwargs = case(name).make()
    program = whence.capture(model, args, kwargs)
    lowered = program.decompose()
    assert targets(program)[str(aten.linear.default)] > 0 == targets(lowered)[str(aten.linear.default)]
    assert not {"aten.layer_norm.default", "aten.matmul.default"} & targets(lowered).keys()
    assert lowered.verify(model, args, kwargs).ok == program.verify(model, args, kwargs).ok
    assert [row.site for row in lowered.calls] == [row.site for row in program.calls]
    expected, found = program.unflatten(copy=True), lowered.unflatten(copy=True)
    assert [name for name, _ in expected.named_modules()] == [name for name, _ in found.named_modules()]


@pytest.mark.parametrize("backward", [False, True])
def test_origins_are_those_of_what_was_taken_apart(backward: bool) -> None:
    """Calls, lines, phases; deduced, by the pass."""
    model = Attending()
    program = whence.capture(model, (torch.randn(2, 3, 8),), backward=backward)
    lowered = program.decompose("core")
    places = Counter((origin.phase, origin.calls) for origin in map(program.where, _operations(program)))
    found = Counter((origin.phase, origin.calls) for origin in map(lowered.where, _operations(lowered)))
    assert found.keys() <= places.keys()
    new = [origin for origin in map(lowered.where, _operations(lowered)) if origin.passes]
    assert new
    assert {(origin.passes, origin.quality) for origin in new} == {(("decompose",), "inferred")}
    assert all(origin.source is not None for origin in new if origin.phase is Phase.FORWARD)


def _operations(program: whence.Program) -> list[Any]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Branching(), X),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.GroupNorm(2, 4), nn.Hardswish()),
            torch.randn(2, 3, 8, 8),
        ),
    ],
    ids=["branches", "convolutions"],
)
def test_core_is_what_torch_export_decomposes_to(model: nn.Module, x: Tensor) -> None:
    """Operator for operator, in branches, too."""
    lowered = whence.capture(model, (x,)).decompose("core")
    exported = torch.export.export(model, (x,), strict=False).run_decompositions()
    parts = [part for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
    views = {"aten.alias.default", "aten.detach.default"}  # torch.export removes those at the end
    expected = Counter(str(node.target) for node in nodes if str(node.target) not in views)
    assert {key: count for key, count in targets(lowered).items() if key not in views} == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("table", [None, "core"])
@pytest.mark.parametrize("backward", [False, True])
def test_open_sizes_stay_open(table: Any, backward: bool) -> None:
    """Sizes are computed where the pieces need them."""
    model, x = Attending().eval().double(), torch.randn(2, 3, 8).double()
    sizes = ({0: Dim.AUTO, 1: Dim.AUTO},)
    lowered = whence.capture(model, (x,), backward=backward, dynamic_shapes=sizes).decompose(table)
    for shape in ((2, 3, 8), (5, 4, 8), (3, 7, 8)):
        given = torch.randn(shape).double()
        if backward:
            assert lowered.unflatten()(given).shape == model(given).shape
        # PyTorch's table computes the softmax of attention by itself: other last bits of 53
        assert torch.allclose(lowered.module()(given), model(given), atol=1e-12 if table else 0, rtol=0)


def test_table_of_ones_own() -> None:
    """By overload or by name; what returns `NotImplemented` is left."""

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        return x * torch.sigmoid(1.702 * x) if approximate == "none" else NotImplemented

    program = whence.capture(lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), (X,))
    for key in (aten.gelu, aten.gelu.default):
        lowered = program.decompose({key: gelu})
        assert targets(lowered) == Counter(
            {"aten.mul.Tensor": 2, "aten.sigmoid.default": 1, "aten.gelu.default": 1, "aten.add.Tensor": 1}
        )
        expected = X * torch.sigmoid(1.702 * X) + F.gelu(X, approximate="tanh")
        assert torch.equal(lowered.module()(X), expected)


def test_writes_become_functional() -> None:
    """Also where what a table calls writes in place."""

    def halved(x: Tensor) -> Tensor:
        made = x.clone()
        made.sigmoid_().mul_(0.5)
        return made

    lowered = whence.capture(lambda x: F.silu(x) + 1, (X,)).decompose({aten.silu: halved})
    assert not any("_." in target for target in targets(lowered))
    assert torch.equal(lowered.module()(X), torch.sigmoid(X) * 0.5 + 1)


def _another_shape(x: Tensor) -> Tensor:
    return x.sum()


def _broken(_: Tensor) -> Tensor:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("table", "error", "said"),
    [
        ("all", whence.UsageError, "no table of decompositions"),
        ({"gelu": F.gelu}, whence.UsageError, "is no decomposition"),
        ({aten.silu: 3}, whence.UsageError, "is no decomposition"),
        ({aten.silu: _another_shape}, whence.UnsupportedOperator, "its decomposition gives"),
        ({aten.silu: lambda x: x * X}, whence.UnsupportedOperator, "convert all Tensors to FakeTensors"),
        ({aten.silu: lambda x: x * x.sum().item()}, whence.UnsupportedOperator, "_local_scalar_dense"),
    ],
    ids=["word", "text", "number", "shape", "tensor", "item"],
)
def test_what_does_not_fit_is_refused(table: Any, error: type[Exception], said: str) -> None:
    """With the operator, its line and what stands against it; the program is as before."""
    program = whence.capture(nn.Sequential(nn.SiLU()), (X,))
    with pytest.raises(error, match=said):
        program.decompose(table)
    assert torch.equal(program.module()(X), F.silu(X))


def test_error_of_a_table_names_the_operator() -> None:
    """It stays what it is, and says where it happened."""
    program = whence.capture(nn.Sequential(nn.SiLU()), (X,))
    with pytest.raises(ZeroDivisionError) as caught:
        program.decompose({aten.silu: _broken})
    assert "aten.silu.default (silu), in module 0" in caught.value.__notes__[0]
    assert torch.equal(program.module()(X), F.silu(X))


def test_dropout_draws_what_it_drew() -> None:
    """The pieces draw in the order in which the whole did."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).train()
    lowered = whence.capture(model, (X,)).decompose()
    assert "aten.dropout.default" not in targets(lowered)
    assert lowered.verify(model, (X,)).ok


@pytest.mark.sample(4)
@pytest.mark.parametrize("table", [None, "core"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks(kind: Any, dropout: float, table: Any) -> None:
    """What they turn in place was as it was; PyTorch's table leaves whole what draws."""
    model, x = kind(4, 5, 2, batch_first=True, dropout=dropout), torch.randn(2, 3, 4)
    lowered = whence.capture(model, (x,)).decompose(table)
    assert lowered.verify(model, (x,)).ok


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
        (nn.GroupNorm(2, 4), (2, 4, 4, 4)),
        (nn.Upsample(scale_factor=2), (2, 3, 4, 4)),
    ],
    ids=["batch norm", "group norm", "upsample"],
)
def test_fractions_of_open_sizes(model: nn.Module, shape: tuple[int, ...]) -> None:
    """PyTorch's table divides by sizes: that is computed in each run."""
    sizes = ({0: Dim.AUTO},)
    program = whence.capture(
        model, (torch.randn(shape, requires_grad=True),), backward=sine_loss, dynamic_shapes=sizes
    )
    given = torch.randn(5, *shape[1:])
    found = []
    for each in (program, program.decompose("core")):
        x = given.clone().requires_grad_()
        each.unflatten(copy=True)(x)[0].backward()
        assert x.grad is not None
        found.append(x.grad)
    # other last bits, as the table has it
    assert torch.allclose(found[0], found[1], atol=1e-6)
    lowered = whence.capture(F.gelu, (X,), dynamic_shapes=sizes).decompose(
        {aten.gelu: lambda x: x * (x.shape[0] / 2)}
    )
    assert torch.equal(lowered.module()(torch.ones(5, 4)), torch.full((5, 4), 2.5))


class TurnedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


@pytest.mark.parametrize("captured", [torch.no_grad, torch.enable_grad])
def test_gradients_that_the_model_turns_on_stay_on(captured: Any) -> None:
    """All pieces of what ran there record them, also where `decompose` is called without."""
    model = TurnedOn()
    with captured():
        program = whence.capture(model, (X,))
    with torch.no_grad():
        lowered = program.decompose()
        assert lowered.verify(model, (X,)).ok
        tree = lowered.unflatten(copy=True)
        result = tree(X)
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in tree.parameters())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
def test_steps_are_lowered(kind: Any) -> None:
    """What computes with a learning rate that only a run has stays whole."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = kind(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sin().sum()
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    for table in (None, "core"):
        assert program.decompose(table).verify(model, (x,), optimizer=optimizer) is not None
    assert program.decompose().verify(model, (x,), optimizer=optimizer).ok


def test_table_that_uses_the_operator_itself() -> None:
    """It is not followed for ever."""
    lowered = whence.capture(torch.sin, (X,)).decompose({aten.sin: lambda x: torch.sin(x) * 2})
    assert torch.equal(lowered.module()(X), torch.sin(X) * 2)

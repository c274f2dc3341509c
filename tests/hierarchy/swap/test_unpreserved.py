"""The same surgery on the tree and on the eager model: a step of each is the same, or refused by name."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from transformers import ConvNextConfig, ConvNextModel

import whence
from tests.checks import differing, gradients, state
from tests.hierarchy.swap.test_preserved import WIDTH, X
from tests.hierarchy.swap.test_preserved_results import llama

Operation = Callable[[Any, Tensor], Tensor]


class Around(nn.Module):
    """Runs a function of itself, of a layer and of a preserved module."""

    def __init__(self, inner: nn.Module, function: Operation) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Does(nn.Module):
    """Runs a function of itself, a layer and perhaps of another module."""

    def __init__(self, function: Operation, base: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.base = nn.Linear(WIDTH, WIDTH), base
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def plainly(m: Any, x: Tensor) -> Tensor:
    """One call."""
    return m.inner(m.first(x)).tanh()


def twice(m: Any, x: Tensor) -> Tensor:
    """Two calls, and another use of what is between."""
    between = m.inner(m.first(x))
    return m.inner(between).sin() + between.cos()


def beside(m: Any, x: Tensor) -> Tensor:
    """One call, beside what goes on without it."""
    return m.first(x) + plainly(m, x)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    """The layer runs without autograd, what follows does not."""
    with torch.no_grad():
        hidden = m.layer(x)
    return hidden * 2


def in_half(function: Operation) -> Operation:
    """Under autocast of the model's own."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(m, x).float()

    return run


def residual(m: Any, x: Tensor) -> Tensor:
    """Uses its argument twice."""
    return x + m.layer(x).tanh()


def transposed(m: Any, x: Tensor) -> Tensor:
    """Gives a result that lies otherwise in memory."""
    return m.layer(x).T.contiguous().T


def written_afterwards(m: Any, x: Tensor) -> Tensor:
    """Writes to what the module returned."""
    hidden = m.inner(m.first(x))
    hidden += x
    return hidden.tanh()


def dropped_afterwards(m: Any, x: Tensor) -> Tensor:
    """Draws for what the module returned."""
    return nn.functional.dropout(plainly(m, x), 0.5)


def grouped_afterwards(m: Any, x: Tensor) -> Tensor:
    """Normalises it in groups, by a kernel that reads contiguous memory."""
    return nn.functional.group_norm(plainly(m, x), 2).sin()


def determined_afterwards(m: Any, x: Tensor) -> Tensor:
    """A determinant, whose backward goes by how the matrix lay in the forward."""
    hidden = plainly(m, x)
    return hidden * torch.linalg.det(hidden[:, :3].sin())


def strided_afterwards(m: Any, x: Tensor) -> Tensor:
    """Reads every other element of its memory."""
    return plainly(m, x).as_strided((3, 2), (4, 2))


def again_in_the_backward(m: Any, x: Tensor) -> Tensor:
    """In a checkpoint."""
    return checkpoint(m.inner, m.first(x), use_reentrant=False)


def dropping(m: Any, x: Tensor) -> Tensor:
    """Draws a mask that a checkpoint needs again."""
    return nn.functional.dropout(m.layer(x), 0.5)


def with_its_scale(m: Any, x: Tensor) -> Tensor:
    """Reads a parameter of the module."""
    return m.inner(m.first(x)) * m.inner.scale


def with_its_weight(m: Any, x: Tensor) -> Tensor:
    """Reads a weight of the module."""
    return m.inner(m.first(x)) @ m.inner.weight


def queries_and_keys(m: Any, x: Tensor) -> Tensor:
    """Uses its argument three times."""
    return m.layer(x) + linear(x, m.layer.weight.sin()) * m.layer(x.cos())


@dataclass(frozen=True)
class Row:
    """A model, the newcomer made of the original, and why it is refused in a joint tree and in any."""

    function: Operation
    new: Callable[[Any], nn.Module]
    original: Callable[[], nn.Module] = lambda: Does(residual)
    joint: str = ""
    always: str = ""


NOT_TRAINED = "freeze it afterwards"
ROWS = {
    "trained where the original did not train": Row(
        beside, lambda _: Does(residual), lambda: Does(without_gradients), joint=NOT_TRAINED
    ),
    "adapter beside a block": Row(plainly, lambda base: Does(lambda m, x: m.base(x) + m.layer(x), base)),
    "wrapper around a block that is called twice": Row(twice, lambda base: nn.Sequential(base, nn.Tanh())),
    "other memory": Row(plainly, lambda _: Does(transposed)),
    "other memory before random numbers": Row(
        dropped_afterwards, lambda _: Does(transposed), always="random numbers are drawn for it afterwards"
    ),
    "other memory before a group norm": Row(grouped_afterwards, lambda _: Does(transposed)),
    "other memory before a determinant": Row(
        determined_afterwards, lambda _: Does(transposed), joint="afterwards goes by that"
    ),
    "other memory before strides": Row(
        strided_afterwards, lambda _: Does(transposed), joint="afterwards goes by that"
    ),
    "argument in half precision": Row(in_half(plainly), lambda _: Does(queries_and_keys)),
    "twice in half precision": Row(in_half(twice), lambda _: Does(residual), always="casts its weights once"),
    "in place": Row(plainly, lambda _: nn.ReLU(inplace=True), nn.GELU, always=r"it writes args\[0\]"),
    "identity that is written afterwards": Row(written_afterwards, lambda _: nn.Identity(), nn.Identity),
    "layer where an identity is written afterwards": Row(
        written_afterwards, lambda _: Does(residual), nn.Identity, always="was an argument at capture"
    ),
    "wrapper around an identity": Row(
        plainly, lambda base: nn.Sequential(base, nn.Tanh()), nn.Identity, always="was an argument at capture"
    ),
    "in a checkpoint": Row(
        again_in_the_backward, lambda _: Does(residual), lambda: Does(dropping), joint="a checkpoint computes"
    ),
    "weight that only the parent read": Row(
        with_its_scale, lambda _: Does(lambda m, x: m.layer(x) * m.scale), joint="its gradient is a sum"
    ),
    "weight that the parent reads and the newcomer lacks": Row(
        with_its_scale, lambda _: nn.Tanh(), always="and the new module keeps none"
    ),
    "without gradients inside, called twice": Row(
        twice, lambda _: nn.Tanh(), lambda: Does(lambda m, x: x + without_gradients(m, x))
    ),
    "computed weight": Row(plainly, lambda _: spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "computed weight that the parent reads": Row(
        with_its_weight,
        lambda _: weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.Linear(WIDTH, WIDTH),
        always="and the new module keeps none",
    ),
    "lazy": Row(plainly, lambda _: nn.LazyLinear(WIDTH), joint="parameters without a size"),
}


def step(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """What one training step leaves behind."""
    given = x.clone().requires_grad_()
    torch.manual_seed(3)
    result = module(given)
    (result * torch.linspace(0.3, 1.7, result.numel()).reshape(result.shape)).sum().backward()
    return {"result": result.detach(), "x": given.grad, **gradients(module), **state(module)}


@pytest.mark.sample(8)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_same_surgery(row: Row, backward: bool) -> None:
    """On the tree and on the eager model."""
    torch.manual_seed(0)
    model, x = Around(row.original(), row.function), X.clone().requires_grad_()
    program = whence.capture(model, (x,), backward=backward, preserve_calls="inner")
    assert program.verify(model, (x,)).ok
    seen = []
    for one in (deepcopy(model), program.unflatten(copy=True)):
        torch.manual_seed(1)
        one.set_submodule("inner", row.new(one.get_submodule("inner")))
        seen.append(one)
    eager, tree = seen
    if words := row.always or (row.joint if backward else ""):
        with pytest.raises(whence.WhenceError, match=words):
            step(tree, X)
    else:
        assert differing(step(eager, X), step(tree, X)) == []


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_module_that_nobody_called(backward: bool, trained: bool) -> None:
    """Another takes its place without anybody noticing."""
    model = Around(nn.Linear(WIDTH, WIDTH).requires_grad_(trained), lambda m, x: m.first(x))
    x = X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=backward, preserve_calls="first").unflatten(copy=True)
    model.inner = nn.Identity()
    tree.set_submodule("inner", nn.Identity())
    assert differing(step(model, X), step(tree, X)) == []


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo's own
def test_state_that_a_newcomer_writes(compiles: bool, wrapped: bool) -> None:
    """It has written it, whether its calls were preserved or not, and its backward reads it."""
    model = Around(nn.BatchNorm1d(WIDTH), plainly)
    tree = whence.capture(model, (X,)).unflatten(copy=True)
    for one in (model, tree):
        torch.manual_seed(1)
        held = one.get_submodule("inner")
        one.set_submodule("inner", nn.Sequential(held, nn.Tanh()) if wrapped else nn.BatchNorm1d(WIDTH))
    if compiles:
        tree.compile(backend="eager")
    for _ in range(2):
        assert differing(step(model, X), step(tree, X)) == []


class Borrows(nn.Module):
    """Uses a weight of another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def test_weight_of_another_module() -> None:
    """All that arrives for it is added in eager's order."""
    model = Around(nn.Linear(WIDTH, WIDTH), lambda m, x: m.first(m.inner(m.first(x).tanh()).tanh()))
    x = X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=True, preserve_calls="*").unflatten(copy=True)
    for one in (model, tree):
        one.set_submodule("inner", Borrows(one.get_parameter("first.weight")))
    assert differing(step(model, X), step(tree, X)) == []


@pytest.mark.parametrize("shares", ["module", "weight"])
def test_weight_of_two_newcomers_that_the_graph_around_reads(shares: str) -> None:
    """All of it is there, whoever used it; with a captured weight it is refused to be one."""

    def function(m: Any, x: Tensor) -> Tensor:
        return linear(m.inner(m.first(x)).tanh(), m.first.weight)

    model, x = Around(nn.Linear(WIDTH, WIDTH), function), X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=True, preserve_calls="*").unflatten(copy=True)
    torch.manual_seed(1)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    for one in (model, tree):
        new = deepcopy([first, second])
        one.set_submodule("first", new[0])
        one.set_submodule("inner", new[0] if shares == "module" else new[1])
    assert differing(step(model, X), step(tree, X)) == []


def test_weight_of_a_newcomer_and_of_a_captured_module() -> None:
    """Both have a captured gradient, which cannot be one."""
    model = Around(nn.Linear(WIDTH, WIDTH), lambda m, x: linear(m.inner(m.first(x)).tanh(), m.first.weight))
    x = X.clone().requires_grad_()
    tree = whence.capture(model, (x,), backward=True, preserve_calls="first").unflatten(copy=True)
    tree.set_submodule("first", new := nn.Linear(WIDTH, WIDTH))
    new.weight = tree.get_parameter("inner.weight")
    with pytest.raises(whence.CallError, match="are one tensor now, and were several at capture"):
        tree(x)


def test_weight_that_autocast_casts_for_two() -> None:
    """Refused, as for one that is called twice."""
    model = Around(nn.Linear(WIDTH, WIDTH), in_half(plainly))
    tree = whence.capture(model, (X,), preserve_calls="*").unflatten(copy=True)
    new = nn.Linear(WIDTH, WIDTH)
    tree.set_submodule("first", new)
    tree.set_submodule("inner", new)
    with pytest.raises(whence.CallError, match="in the place of first shares weights"):
        tree(X)


def test_newcomer_inside_a_block_that_a_newcomer_wraps() -> None:
    """What arrives for its weights goes out piece by piece."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    model, x = Around(Block(), twice), X.clone().requires_grad_()
    program = whence.capture(model, (x,), backward=True, preserve_calls=["inner", "inner.layer"])
    tree = program.unflatten(copy=True)
    new = nn.Linear(WIDTH, WIDTH)
    for one in (model, tree):
        one.set_submodule("inner.layer", deepcopy(new))
        one.set_submodule("inner", nn.Sequential(one.get_submodule("inner"), nn.Tanh()))
    assert differing(step(model, X), step(tree, X)) == []


def test_adapter_around_attention() -> None:
    """Which gives its weights, too, and nothing uses them."""
    torch.manual_seed(0)
    model, ids, path = llama("eager"), torch.arange(12).reshape(2, 6), "model.layers.1.self_attn"

    def loss(outputs: Any) -> Tensor:
        return outputs.logits.square().mean()

    tree = whence.capture(model, (ids,), backward=loss, preserve_calls=path).unflatten(copy=True)
    for one in (model, tree):
        one.set_submodule(path, Beside(one.get_submodule(path)))
    loss(model(ids)).backward()
    tree(ids)[0].backward()
    assert differing(gradients(model), gradients(tree)) == []


class Beside(nn.Module):
    """Attention and an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.adapter = base, nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        attended, *more = self.base(hidden_states=hidden_states, **others)
        return attended + self.adapter(hidden_states), *more


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_functional_call(swapped: bool, training: bool) -> None:
    """The backward runs with the tensors that the forward ran with, after these were taken out again."""
    model = Around(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)), plainly).train(training)
    tree = whence.capture(model, (X,), backward=True, preserve_calls="first").unflatten(copy=True)
    found = []
    for one in (model, tree):
        torch.manual_seed(1)
        if swapped:
            one.set_submodule("first", nn.Linear(WIDTH, WIDTH))
        tensors = {name: held.detach() * 1.5 for name, held in one.named_parameters()}
        held = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        buffers = {name: held * 2 for name, held in one.named_buffers() if held.is_floating_point()}
        functional_call(one, {**held, **buffers}, (X,)).sin().sum().backward()
        found.append({name: tensor.grad for name, tensor in held.items()})
    assert differing(*found) == []


def test_between_forward_and_backward() -> None:
    """A newcomer that ran is differentiated, wherever it is by then; one that did not is refused by name."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    tree = whence.capture(model, (X,), backward=True, preserve_calls=["*"]).unflatten(copy=True)
    original, new = tree.get_submodule("0"), nn.Linear(WIDTH, WIDTH)
    result = tree(X)
    tree.set_submodule("0", new)
    with pytest.raises(whence.CallError, match="between a forward and its backward"):
        result.sum().backward()
    result = tree(X)
    tree.set_submodule("0", original)
    result.sum().backward()
    assert new.weight.grad is not None
    tree.set_submodule("0", frozen := nn.Linear(WIDTH, WIDTH))
    result = tree(X)
    frozen.requires_grad_(False)
    result.sum().backward()
    assert frozen.weight.grad is None


def test_norms_of_a_model_that_permutes() -> None:
    """They become identities, whose results lie in memory otherwise than the norms' did."""
    torch.manual_seed(0)
    sizes = ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], drop_path_rate=0.0)
    model, images = ConvNextModel(sizes).eval(), torch.randn(2, 3, 16, 16)

    def loss(outputs: Any) -> Tensor:
        return outputs[1].square().mean()

    norms = [name for name, part in model.named_modules() if "layernorm" in name and not [*part.children()]]
    tree = whence.capture(model, (images,), backward=loss, preserve_calls=norms).unflatten(copy=True)
    for name in norms:
        for one in (model, tree):
            one.set_submodule(name, nn.Identity())
    loss(model(images)).backward()
    tree(images)[0].backward()
    assert norms
    assert differing(gradients(model), gradients(tree)) == []

"""A tree trains as the original does, bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import differing, gradients, same_bits, state, verified
from tests.models import ModelCase, case

NAMES = [
    *("gpt2_dropout", "t5", "mamba", "resnet", "unet", "lstm", "gru"),
    *(
        "tied_language_model",
        "shared_layer",
        "shared_module",
        "weight_norm",
        "spectral_norm",
        "momentum_teacher",
    ),
    *("checkpoint_dropout", "running_statistics", "inplace_views", "autocast", "variational"),
]
STEPS = 4
X = torch.randn(2, 3, zoo.WIDTH)


def losses(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: type[torch.optim.Optimizer], lr: float
) -> list[Tensor]:
    """The losses of some steps, each from its own seed."""
    stepper = optimizer(model.parameters(), lr=lr)  # type: ignore[call-arg]
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        stepper.zero_grad()
        value = loss()
        value.backward()
        stepper.step()
        found.append(value.detach())
    return found


def trained_alike(row: ModelCase, make_tree: Callable[[whence.Program], nn.Module], joint: bool) -> list[str]:
    """Train the original and the tree some steps; everything in which they differ."""
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs, backward=row.loss if joint else False)
    tree = make_tree(program)
    original, _, _ = row.make()

    def of_tree() -> Tensor:
        result = tree(*args, **kwargs)
        return result[0] if joint else row.loss(result)

    expected = losses(original, lambda: row.loss(original(*args, **kwargs)), torch.optim.SGD, 0.05)
    found = losses(tree, of_tree, torch.optim.SGD, 0.05)
    different = [
        f"loss {i}" for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same_bits(a, b)
    ]
    return (
        different + differing(state(original), state(tree)) + differing(gradients(original), gradients(tree))
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_a_tree(name: str, joint: bool) -> None:
    """SGD steps give the original's losses, parameters, buffers and gradients, bit for bit."""
    assert trained_alike(case(name), lambda program: program.unflatten(), joint) == []


def test_steps_with_a_custom_function() -> None:
    """A tree whose backward was captured trains through hand-written derivatives."""
    assert trained_alike(case("custom_function"), lambda program: program.unflatten(), True) == []


def test_custom_function_without_its_backward_is_refused() -> None:
    """A forward-only tree that ran a hand-written derivative refuses to be differentiated."""
    row = case("custom_function")
    model, args, _ = row.make()
    output = whence.capture(model, args).unflatten()(*args)
    with pytest.raises(whence.NotDifferentiable, match="RoundStraightThrough"):
        row.loss(output).backward()


@pytest.mark.sample(2)
@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", ["gpt2_dropout", "resnet", "tied_language_model", "checkpoint_dropout"])
def test_steps_of_a_flat_module(name: str, joint: bool) -> None:
    """The flat module trains as the original does, bit for bit."""
    assert trained_alike(case(name), lambda program: program.module(), joint) == []


def test_training_the_tree_trains_the_model() -> None:
    """A tree shares the model's tensors: after steps on the tree, the model has moved."""
    model = zoo.Mlp()
    before = state(model)
    tree = whence.capture(model, (X,)).unflatten()
    losses(tree, lambda: tree(X).sin().sum(), torch.optim.SGD, 0.1)
    assert differing(before, state(model))
    assert differing(state(model), state(tree)) == []


def test_training_a_copy_leaves_the_model_alone() -> None:
    """A tree made with `copy=True` has tensors of its own."""
    model = zoo.Mlp()
    before = state(model)
    tree = whence.capture(model, (X,)).unflatten(copy=True)
    losses(tree, lambda: tree(X).sin().sum(), torch.optim.SGD, 0.1)
    assert differing(before, state(model)) == []


def test_adam_with_tied_weights() -> None:
    """Adam keeps one state for a tied weight, in the tree as in the original."""
    row = case("tied_language_model")
    model, args, _ = row.make()
    original = deepcopy(model)
    tree = whence.capture(model, args, backward=row.loss).unflatten()
    expected = losses(original, lambda: row.loss(original(*args)), torch.optim.Adam, 0.01)
    found = losses(tree, lambda: tree(*args)[0], torch.optim.Adam, 0.01)
    assert all(map(same_bits, expected, found))
    assert differing(state(original), state(tree)) == []


def pair(backward: Any = True) -> tuple[nn.Module, nn.Module]:
    """A model and the tree of a copy of it."""
    torch.manual_seed(0)
    model = zoo.SharedLayer()
    return model, whence.capture(deepcopy(model), (X,), backward=backward).unflatten()


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_add_up_over_two_batches(backward: bool) -> None:
    """Without `zero_grad` the gradients of two batches add up as in eager."""
    both = pair(backward)
    for module in both:
        for batch in (X, X.cos()):
            module(batch).sin().sum().backward()
    assert differing(*map(gradients, both)) == []


@pytest.mark.parametrize("backward", [False, True])
def test_backward_twice_through_one_graph(backward: bool) -> None:
    """With `retain_graph` a second backward adds the same gradients again."""
    both = pair(backward)
    for module in both:
        value = module(X).sin().sum()
        value.backward(retain_graph=True)
        value.backward()
    assert differing(*map(gradients, both)) == []


def test_backward_twice_without_retaining_is_an_error() -> None:
    """As in eager, a graph that was not retained cannot be walked again."""
    _, tree = pair()
    value = tree(X).sin().sum()
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_of_some_parameters(backward: bool) -> None:
    """`torch.autograd.grad` for some parameters gives eager's gradients and touches no `.grad`."""
    model, tree = pair(backward)
    expected, found = (
        torch.autograd.grad(m(X).sin().sum(), [m.get_parameter("block.up.weight")]) for m in (model, tree)
    )
    assert same_bits(expected[0], found[0])
    assert set(gradients(tree).values()) == {None}


@pytest.mark.parametrize("backward", [False, True])
def test_frozen_after_the_capture(backward: bool) -> None:
    """A parameter that is frozen after the capture gets no gradient, and the others get theirs."""
    both = pair(backward)
    for module in both:
        module.get_parameter("block.up.weight").requires_grad_(False)
        module(X).sin().sum().backward()
    assert differing(*map(gradients, both)) == []


def test_thawed_after_the_capture() -> None:
    """A parameter that required no gradient at capture and does now has no backward, and the tree says so."""
    model = zoo.PartlyFrozen()
    tree = whence.capture(model, (X,), backward=True).unflatten()
    tree.requires_grad_(True)
    with pytest.raises(
        whence.CallError, match=r"p_frozen_weight.* require a gradient now, and did not at capture"
    ):
        tree(X)


def test_parameter_changed_between_forward_and_backward() -> None:
    """As in eager, changing a parameter that the backward needs is an error, not a wrong gradient."""
    _, tree = pair()
    value = tree(X).sin().sum()
    with torch.no_grad():
        tree.get_parameter("block.up.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("backward", [False, True])
def test_without_grad_mode(backward: bool) -> None:
    """Under `no_grad` the outputs are the same and carry no history."""
    model, tree = pair(backward)
    with torch.no_grad():
        output = tree(X)
        assert same_bits(output, model(X))
    assert not output.requires_grad


def test_loss_program_returns_loss_and_outputs() -> None:
    """A tree captured with a loss returns the loss and the outputs, as eager computes them."""
    model, tree = pair(lambda output: output.sin().sum())
    loss, output = tree(X)
    assert same_bits(output, model(X))
    assert same_bits(loss, model(X).sin().sum())


def test_second_derivative_is_refused() -> None:
    """Differentiating the captured backward again is refused, not answered wrong."""
    _, tree = pair()
    (first,) = torch.autograd.grad(
        tree(X).sin().sum(), [tree.get_parameter("block.up.weight")], create_graph=True
    )
    with pytest.raises(whence.NotDifferentiable):
        first.square().sum().backward()


def upstream_gradients() -> list[Any]:
    """Ways in which a gradient for an output of three dimensions arrives."""
    targets = torch.randint(0, zoo.WIDTH, (2, 3))
    weight = torch.randn(zoo.WIDTH, 3)
    return [
        pytest.param(lambda output: output.sum(), id="expanded"),
        pytest.param(
            lambda output: F.cross_entropy(output.transpose(1, 2), targets), id="cross entropy over classes"
        ),
        pytest.param(lambda output: (output.transpose(1, 2) * weight).sum(), id="transposed"),
        pytest.param(lambda output: output[:, -1].sin().sum(), id="last position"),
        pytest.param(lambda output: (output.contiguous().view(-1) ** 2).sum(), id="flattened"),
    ]


class Projecting(nn.Module):
    """A linear layer, whose output is returned as it is or transposed."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden.transpose(0, 1).contiguous().transpose(0, 1) if self.turned else hidden


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("loss", upstream_gradients())
def test_gradient_of_an_output_in_any_layout(
    loss: Callable[[Tensor], Tensor], turned: bool, backward: bool
) -> None:
    """The captured backward takes gradients with any strides, as autograd's does."""
    torch.manual_seed(0)
    model = Projecting(turned)
    tree = whence.capture(deepcopy(model), (X,), backward=backward).unflatten()
    for module in (model, tree):
        loss(module(X)).backward()
    assert differing(gradients(model), gradients(tree)) == []


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, zoo.WIDTH),
    "transposed": lambda: torch.randn(zoo.WIDTH, 3, 2).transpose(0, 2),
    "expanded": lambda: torch.randn(1, 1, zoo.WIDTH).expand(2, 3, zoo.WIDTH),
    "every other": lambda: torch.randn(2, 3, 2 * zoo.WIDTH)[..., ::2],
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("captured", LAYOUTS)
def test_input_in_any_layout(captured: str, given: str, backward: bool) -> None:
    """A tree takes inputs of other strides than the example's, as the original does."""
    torch.manual_seed(0)
    model, x = Projecting(False), LAYOUTS[given]()
    tree = whence.capture(deepcopy(model), (LAYOUTS[captured](),), backward=backward).unflatten()
    outputs = [module(x) for module in (model, tree)]
    for output in outputs:
        output.sin().sum().backward()
    assert same_bits(*outputs)
    assert differing(gradients(model), gradients(tree)) == []


class Multiplies(nn.Module):
    """A product whose kernel is chosen by how a matrix lies, perhaps after it was made contiguous."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.weight, self.gathers = nn.Parameter(torch.randn(16)), gathers

    def forward(self, x: Tensor) -> Tensor:
        return torch.mv((x.contiguous() if self.gathers else x)[0, 0], self.weight)


IN_ANY_LAYOUT: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
    ),
    "head": lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Conv2d(4, 2, 1)),
    "recurrent": lambda: nn.Sequential(nn.Flatten(2), nn.GRU(256, 4, batch_first=True)),
    "product": lambda: Multiplies(gathers=False),
    "product of what is contiguous": lambda: Multiplies(gathers=True),
}
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every other": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", IN_ANY_LAYOUT)
@pytest.mark.parametrize("layout", IMAGES.values(), ids=IMAGES)
def test_forward_in_any_layout(name: str, layout: Callable[[Tensor], Tensor], is_compiled: bool) -> None:
    """A forward program computes in another layout than the capture's what eager computes in it."""
    torch.manual_seed(0)
    model, x = IN_ANY_LAYOUT[name](), torch.randn(3, 4, 16, 16)
    program = whence.capture(deepcopy(model), (x,))
    tree: nn.Module = program.unflatten()
    if is_compiled:
        tree.compile(backend="eager")
    found: list[Any] = []
    for module in (model, tree):
        torch.manual_seed(1)
        result = module(layout(x))
        output = result[0] if isinstance(result, tuple) else result
        output.sin().sum().backward()
        found.append(output)
    assert same_bits(*found)
    assert found[0].stride() == found[1].stride()
    assert differing(gradients(model), gradients(tree)) == []
    assert ("args[0]" in program.convention.any_layout) == (name != "product of what is contiguous")


@pytest.mark.parametrize("name", IN_ANY_LAYOUT)
@pytest.mark.parametrize("layout", IMAGES.values(), ids=IMAGES)
def test_bound_forward_in_any_layout(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    """On live state, too; one that relies on the layout is stale there."""
    torch.manual_seed(0)
    model, x = IN_ANY_LAYOUT[name](), torch.randn(3, 4, 16, 16)
    other = deepcopy(model)
    bound = whence.capture(model, (x,)).bind(model)
    if name == "product of what is contiguous" and not layout(x).is_contiguous():
        with pytest.raises(whence.StaleCapture, match="strides"):
            bound(layout(x))
        return
    torch.manual_seed(1)
    expected = other(layout(x))
    torch.manual_seed(1)
    result = bound(layout(x))
    pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
    assert all(same_bits(*pair) for pair in pairs)
    assert differing(state(other), state(model)) == []


class Writing(nn.Module):
    """Writes to what it is given, in one way or another."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return x.sin()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(2),
    "by an activation": nn.ReLU(inplace=True),
    "a row": lambda x: x.__setitem__(0, 1.0),
    "through a view": lambda x: x.view(-1).mul_(2),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", WRITES)
def test_an_input_with_a_history_that_is_written(way: str, backward: bool) -> None:
    """Eager differentiates through the write; it is refused by name, and of a leaf it is autograd's error."""
    leaf = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    with pytest.raises(whence.UnsupportedMutation, match=r"writes to the input `x` \(args\[0\]\)") as caught:
        whence.capture(Writing(WRITES[way]), (leaf * 1,), backward=backward)
    assert "x.clone()" in caught.value.remedy
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
        whence.capture(Writing(WRITES[way]), (leaf,), backward=backward)
    assert verified(Writing(WRITES[way]), leaf.detach() * 1)


def test_one_output_of_two_is_differentiated() -> None:
    """With tangents, the gradients of outputs that are not used count as absent, not as zeros."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(zoo.WIDTH, 4)
            self.right = nn.Linear(zoo.WIDTH, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    model = Two()
    tree = whence.capture(deepcopy(model), (X,), backward=True).unflatten()
    for module in (model, tree):
        module(X)[0].sin().sum().backward()
    assert differing(gradients(model), gradients(tree)) == []
    assert tree.get_parameter("right.weight").grad is None


class Transposed(nn.Module):
    """Writes a column of what lies transposed in memory: autograd lays its gradient out in the same way."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(x.sin().t().contiguous().t()) * 1
        hidden[:, 0] = 0
        return hidden


class Rotated(nn.Module):
    """Multiplies pairs of features as complex numbers: autograd makes the gradient of a result contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(6, 4, 2))
        return torch.view_as_real(pairs * pairs)


class Grouped(nn.Module):
    """Normalises groups of channels: the kernel of the backward reads a gradient as if it were contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.view(2, 6, 4).sin(), 3)


class Laid(nn.Module):
    """Normalises what lies with its channels last, and so does autograd lay the gradient out."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.view(2, 6, 2, 2).contiguous(memory_format=torch.channels_last).sin(), 3)


class Strided(nn.Module):
    """Writes to every other element of memory; the gradient of what is written is read in the same way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided_scatter(x.sin(), x[:3, :4] * 2, (3, 4), (16, 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Transposed, Rotated, Grouped, Laid, Strided])
def test_gradients_of_another_layout_than_at_capture(kind: type[nn.Module], seed: int) -> None:
    """What autograd lays out anew, the captured backward does, too, however the gradient of a result lies."""
    torch.manual_seed(seed)
    model, x = kind(), torch.randn(6, 8, requires_grad=True)
    tree = whence.capture(model, (x,), backward=True).unflatten()
    found: list[Tensor | None] = []
    for module in (model, tree):
        x.grad = None
        output = module(x)
        gradient = torch.linspace(0.5, 1.5, 48).view(output.shape[::-1])
        output.backward(gradient.permute(*reversed(range(output.dim()))))
        found.append(x.grad)
    assert same_bits(*found)

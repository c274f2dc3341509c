"""One module of a tree, called by a person as the original is called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import same_bits
from tests.hierarchy.calling import differences
from tests.models import case

BLOCKS = ["gpt2", "llama", "bert", "t5", "vit"]
ZOO = [
    *("unet", "diffusion_transformer", "transformer", "gru", "lstm", "named_branches", "weight_norm"),
    *("tied_language_model", "shared_layer", "shared_module", "dense_experts", "hooked", "closure"),
    *("momentum_teacher", "inplace_activations", "running_statistics", "dict_to_dataclass", "fourier"),
    *("tied_autoencoder", "partly_frozen", "spectral_norm", "transformer_encoder_dropout", "gpt2_dropout"),
]
NAMES = [*BLOCKS, *ZOO]
X = torch.randn(2, 3, zoo.WIDTH)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_submodules_of_a_forward_tree(name: str) -> None:
    """Each submodule called alone has the outputs and gradients of the original called alone, bit for bit."""
    assert differences(name, False) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_submodules_of_a_joint_tree(name: str) -> None:
    """The same with the captured backward of a loss: gradients of parameters and inputs, bit for bit."""
    assert differences(name, case(name).loss) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_submodules_of_a_tree_with_tangents(name: str) -> None:
    """The same with the captured backward of every output."""
    assert differences(name, True) == []


@pytest.mark.parametrize("mode", [False, True])
def test_argument_that_nothing_uses(mode: bool) -> None:
    """A submodule that ignores one of its arguments may be given any tensor for it."""

    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = zoo.Mlp()

        def forward(self, hidden: Tensor, unused: Tensor) -> Tensor:
            return self.layer(hidden)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Ignoring()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden, hidden.cos())

    model = Around()
    tree: Any = whence.capture(model, (X,), backward=mode).unflatten()
    assert same_bits(tree.inner(X, X.cos()), model.inner(X, X.cos()))


def test_result_that_nothing_uses_is_absent() -> None:
    """A result that the program does not compute is an object that says why, in its place."""
    tree: Any = whence.capture(zoo.LstmClassifier(), (torch.tensor([[1, 2, 3]]),)).unflatten()
    outputs, (hidden, _) = tree.encoder(torch.randn(1, 3, zoo.WIDTH))
    assert "nothing in the program uses" in outputs.reason
    assert hidden.shape == (4, 1, zoo.WIDTH)


def test_module_before_a_write_through_a_view() -> None:
    """A module whose result its caller changes through a view gives, alone, the result before the change."""
    model = zoo.InplaceViews()
    model.enter = nn.Sequential(model.enter, nn.Unflatten(-1, (zoo.WIDTH,)))  # type: ignore[assignment]
    tree: Any = whence.capture(model, (X,)).unflatten()
    assert isinstance(found := tree.enter(X), Tensor)
    assert same_bits(found, model.enter(X))


def test_module_after_a_write_through_a_view() -> None:
    """A module that is given a value changed through a view can be called alone."""
    model = zoo.InplaceViews()
    tree: Any = whence.capture(model, (X,)).unflatten()
    assert same_bits(tree.leave(X), model.leave(X))


def test_module_that_makes_a_constant() -> None:
    """A module whose forward makes a tensor from a literal can be called alone."""

    class Literal(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * torch.tensor([2.0])

    model = nn.Sequential(Literal(), nn.ReLU())
    tree: Any = whence.capture(model, (X,)).unflatten()
    assert same_bits(tree.get_submodule("0")(X), model[0](X))


def test_module_that_needs_a_hidden_value_says_which() -> None:
    """A module that reads a value of its caller past its arguments cannot be called alone, and says so."""

    class Reading(nn.Module):
        def __init__(self, around: list[Tensor]) -> None:
            super().__init__()
            self.around = around

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.around[0]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[Tensor] = []
            self.inner = Reading(self.values)

        def forward(self, hidden: Tensor) -> Tensor:
            self.values[:] = [hidden.cos()]
            result = self.inner(hidden)
            self.values.clear()
            return result

    tree: Any = whence.capture(Around(), (X,)).unflatten()
    with pytest.raises(whence.CallError, match="inner cannot be called alone") as caught:
        tree.inner(X)
    assert "cos" in caught.value.why


def test_module_that_was_never_called_says_so() -> None:
    """A module without a call has no graph, and the error says what to do."""
    tree: Any = whence.capture(zoo.PartlyFrozen(), (X,)).unflatten()
    with pytest.raises(whence.CallError, match="Linear has no graph of its own") as caught:
        tree.unused(X)
    assert caught.value.why == "it was not called in the capture"


def test_module_in_its_callers_graph_says_so() -> None:
    """A module that was called where no graph of its own can be says where its operations are."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, self.inner, lambda x: x.sin(), (x,))

    model = Branching()
    program = whence.capture(model, (X,))
    for tree in (program.unflatten(), program.unflatten(onto=model)):
        with pytest.raises(whence.CallError, match="part of its caller's graph, in a branch"):
            tree.inner(X)


def test_size_that_a_module_returns_is_there_when_it_is_called_alone() -> None:
    """A varying size that is a result follows from those of the arguments."""

    class Length(nn.Module):
        def forward(self, x: Tensor) -> int:
            return x.shape[0]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Length()

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = x * self.inner(x)
            return scaled

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    tree: Any = whence.capture(Scaled(), (X,), dynamic_shapes=shapes).unflatten()
    assert [tree.inner(torch.randn(size, *X.shape[1:])) for size in (2, 5)] == [2, 5]


def test_wrong_arguments_are_refused() -> None:
    """A submodule called with another shape than in the capture says which argument is wrong."""
    tree: Any = whence.capture(zoo.Mlp(), (X,)).unflatten()
    with pytest.raises(whence.CallError, match=r"args\[0\] was f32\[2, 3, 32\] at capture, is f32\[5, 32\]"):
        tree.up(torch.randn(5, zoo.WIDTH))


def test_call_of_a_shared_module_is_chosen_by_its_arguments() -> None:
    """A module called with two shapes runs the call that fits the arguments it is given."""
    model = zoo.SharedAcrossNames()
    question, answer = torch.randn(2, 3, zoo.WIDTH), torch.randn(2, 5, zoo.WIDTH)
    tree: Any = whence.capture(model, (question, answer)).unflatten()
    assert same_bits(tree.question(answer), model.question(answer))
    assert same_bits(tree.question(question), model.question(question))


def test_stray_call_does_not_disturb_the_tree() -> None:
    """After a submodule was called alone, the tree still computes what it computed."""
    model = zoo.SharedLayer()
    tree: Any = whence.capture(model, (X,)).unflatten()
    tree.block(X)
    assert same_bits(tree(X), model(X))


def test_input_that_needs_a_gradient_only_now() -> None:
    """A module that got a plain input at capture refuses one that requires a gradient."""
    model = zoo.Mlp()
    tree: Any = whence.capture(model, (X,), backward=True).unflatten()
    with pytest.raises(whence.CallError, match="hidden require a gradient now"):
        tree(X.clone().requires_grad_())


def test_later_call_that_differentiates_its_input() -> None:
    """Of several calls that fit, one that can differentiate the given input is taken."""
    model = zoo.SharedLayer()
    tree: Any = whence.capture(model, (X,), backward=True).unflatten()
    given = [X.clone().requires_grad_() for _ in range(2)]
    tree.block(given[0]).sum().backward()
    model.block(given[1]).sum().backward()
    assert same_bits(given[0].grad, given[1].grad)


def test_unused_result_cannot_be_differentiated_silently() -> None:
    """The captured backward has no place for its gradient: differentiating it is an error, also in a sum."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = zoo.Mlp()

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(hidden)
            return hidden.sin(), hidden.cos()

    tree: Any = whence.capture(Two(), (X,), backward=lambda results: results[0].sum()).unflatten()
    loss, (_, unused) = tree(X)
    with pytest.raises(whence.NotDifferentiable, match="used no gradient"):
        (loss + unused.sum()).backward()

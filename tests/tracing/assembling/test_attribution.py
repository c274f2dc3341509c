"""Where nodes come from, on models small enough to know the answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import whence
from tests import zoo
from whence import Phase, Quality
from whence.program.node_records import origin_of

aten = torch.ops.aten
FEATURES = torch.randn(2, 3, zoo.WIDTH)


def total(output: Tensor) -> Tensor:
    return output.sin().sum()


class TwoReaders(nn.Module):
    """One value that two modules read."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.shared(x)
        return self.left(hidden) * self.right(hidden)


def sites(node: fx.Node) -> list[str]:
    return [str(site) for site in origin_of(node).calls]


def accumulated(program: whence.Program) -> list[fx.Node]:
    return [node for node in program.nodes() if origin_of(node).quality is Quality.ACCUMULATED]


@pytest.fixture(scope="module")
def readers() -> whence.Program:
    return whence.capture(TwoReaders(), (torch.randn(3, 4),), backward=total)


def test_operation_belongs_to_the_innermost_call(readers: whence.Program) -> None:
    """What a module computes names that module's call with its full path and class."""
    (node,) = readers.select("left :: aten.addmm")
    (site,) = origin_of(node).calls
    assert (str(site.path), site.index, site.type) == ("left", 0, "Linear")


def test_operation_between_modules_belongs_to_the_caller(readers: whence.Program) -> None:
    """What a forward computes itself belongs to its own module."""
    product = readers.output("output").node
    assert product is not None
    assert [site.type for site in readers.where(product).calls] == ["TwoReaders"]


def test_gradients_of_two_readers_are_one_accumulation(readers: whence.Program) -> None:
    """The sum of the gradients of a value that two modules read names both."""
    (node,) = accumulated(readers)
    assert node.target is aten.add.Tensor
    assert sorted(sites(node)) == ["left", "right"]


def test_contributors_are_in_order_of_arrival(readers: whence.Program) -> None:
    """The contributors of a sum are named in the order in which their gradients arrived."""
    (node,) = accumulated(readers)
    makers = [sites(argument)[0] for argument in node.all_input_nodes]
    assert sites(node) == makers


def test_accumulation_belongs_to_the_call_around_its_contributors(readers: whence.Program) -> None:
    """The place of a sum of two modules' gradients is the module that called both."""
    (node,) = accumulated(readers)
    assert str(readers.call_of(node).site) == ""


def test_parameter_used_in_two_modules_is_summed_around_them() -> None:
    """The gradient of a tied weight is a sum that names the module of every use."""
    program = whence.capture(zoo.TiedLanguageModel(), (torch.tensor([[1, 2, 3]]),), backward=total)
    node = program.node(str(program.output("embedding.weight").node))
    assert origin_of(node).quality is Quality.ACCUMULATED
    assert sorted(sites(node)) == ["embedding", "head"]


def test_sum_inside_one_call_names_that_call() -> None:
    """A value that one module reads twice is summed in that module."""
    program = whence.capture(zoo.Mlp(), (FEATURES.clone().requires_grad_(),), backward=total)
    node = program.node(str(program.output("grad_hidden").node))
    assert origin_of(node).quality is Quality.ACCUMULATED
    assert {str(site.path) for site in origin_of(node).calls} <= {"", "norm"}


def test_backward_node_belongs_to_the_module_of_its_forward_node(readers: whence.Program) -> None:
    """The backward of a module's operation has that module's call and names the operation."""
    for node in readers.select(":: :: backward"):
        origin = origin_of(node)
        if origin.forward is not None:
            assert origin_of(readers.node(origin.forward)).calls == origin.calls


def test_backward_node_names_the_operation_it_differentiates() -> None:
    """`tanh_backward` differentiates `tanh`, and points at its line."""
    program = whence.capture(nn.Tanh(), (torch.randn(3).requires_grad_(),), backward=total)
    (node,) = program.select(":: aten.tanh_backward")
    forward = program.node(str(origin_of(node).forward))
    assert forward.target is aten.tanh.default
    assert origin_of(node).source == origin_of(forward).source


def test_seed_of_the_loss_is_exact_and_outside_any_module(readers: whence.Program) -> None:
    """The one from which the backward starts is made by nobody's module."""
    (node,) = readers.select(":: aten.ones_like")
    assert (origin_of(node).calls, origin_of(node).quality) == ((), Quality.EXACT)


def test_loss_belongs_to_no_module_but_to_a_line(readers: whence.Program) -> None:
    """What a loss function computes has no calls, and points at the line of the loss function."""
    (node,) = readers.select(":: aten.sin")
    origin = origin_of(node)
    assert (origin.calls, origin.phase) == ((), Phase.FORWARD)
    assert origin.source is not None
    assert (origin.source.file, origin.source.function) == (__file__, "total")


def test_free_function_belongs_to_no_module_but_to_a_line() -> None:
    """What a captured function computes outside any module has no calls, and points at its line."""
    layer = nn.Linear(4, 4)

    def doubled(x: Tensor) -> Tensor:
        return layer(x * 2)

    program = whence.capture(doubled, (torch.randn(3, 4),))
    (product,) = program.select(":: aten.mul")
    origin = origin_of(product)
    assert origin.calls == ()
    assert origin.source is not None and origin.source.function.endswith("doubled")
    assert sites(program.select("layer")[0]) == ["layer"]


def test_free_function_called_by_a_module_belongs_to_it() -> None:
    """What a function computes for a module belongs to the module, at the function's line."""
    program = whence.capture(zoo.ClosureOps(), (FEATURES,))
    (node,) = program.select(":: aten.rsqrt")
    origin = origin_of(node)
    assert [site.type for site in origin.calls] == ["ClosureOps"]
    assert origin.source is not None and origin.source.function == "standardize"


def test_source_is_the_user_s_line() -> None:
    """The line of an operation is the user's line that led to it, not one inside torch."""
    program = whence.capture(zoo.Mlp(), (FEATURES,))
    (node,) = program.select(":: aten.gelu")
    source = origin_of(node).source
    assert source is not None
    assert (source.file, source.function) == (zoo.__file__, "Mlp.forward")


def test_source_falls_back_to_a_torch_module() -> None:
    """Where no user line is on the stack, the line of torch's own module stands in."""
    program = whence.capture(nn.ReLU(), (torch.randn(3),))
    source = origin_of(program.select("**")[0]).source
    assert source is not None
    assert source.function == "ReLU.forward"


def test_gradient_hook_is_inferred() -> None:
    """What a hook on a tensor computes belongs to the call that made the tensor, as a deduction."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return torch.tanh(hidden)

    program = whence.capture(Watched(), (torch.randn(3, 4),), backward=total)
    (node,) = program.select(":: aten.clamp")
    assert (sites(node), origin_of(node).quality) == (["layer"], Quality.INFERRED)


def test_custom_function_belongs_to_its_module_in_both_phases() -> None:
    """The hand-written backward of a custom function belongs to the call that applied it."""
    program = whence.capture(zoo.QuantizedGate(), (FEATURES,), backward=total)
    forward, backward = program.select(":: aten.round"), program.select(":: aten.rsub :: backward")
    assert {site.type for node in (*forward, *backward) for site in origin_of(node).calls} == {
        "QuantizedGate"
    }


def test_functional_form_keeps_origins() -> None:
    """What replaces an in-place operation has the origin of that operation."""
    program = whence.capture(zoo.InplaceActivations().train(), (torch.randn(2, 3, 8, 8),))
    normalised = [n for n in program.select("stem") if "batch_norm" in str(n.target)]
    assert [sites(node) for node in normalised] == [["stem.1"]]


def test_hook_of_a_module_belongs_to_the_module() -> None:
    """What a forward hook computes is part of the call it is hooked to."""
    program = whence.capture(zoo.Hooked(), (FEATURES,))
    assert [sites(node) for node in program.select(":: aten.tanh")] == [["block"]]


def modules_made_on_the_spot() -> nn.Module:
    class Spontaneous(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softplus()(x)

    return Spontaneous()


def test_module_without_a_name_belongs_to_its_caller() -> None:
    """A module that is not part of the model has no path, and its operations are its caller's."""
    program = whence.capture(modules_made_on_the_spot(), (torch.randn(3),))
    (node,) = program.select("**")
    assert [site.type for site in origin_of(node).calls] == ["Spontaneous"]


@pytest.mark.parametrize("build", [zoo.Checkpointed, lambda: zoo.Checkpointed(dropout=0.1)])
def test_recomputation_is_marked(build: Callable[[], Any]) -> None:
    """What a checkpoint computes again is of the same call, in the backward, and marked."""
    program = whence.capture(build().train(), (FEATURES,), backward=total)
    again = [node for node in program.nodes() if origin_of(node).recomputed]
    assert {origin_of(node).phase for node in again} == {Phase.BACKWARD}
    first = program.select("blocks.1.up :: aten.addmm :: forward")
    (repeated,) = [node for node in program.select("blocks.1.up :: aten.addmm") if node in again]
    assert sites(repeated) == sites(first[0]) == ["blocks.1.up"]


def test_nothing_else_is_marked_as_recomputed(readers: whence.Program) -> None:
    """Without a checkpoint nothing is marked as computed again."""
    assert not [node for node in readers.nodes() if origin_of(node).recomputed]


def test_recomputation_reuses_the_random_numbers() -> None:
    """A recomputed dropout reads the mask that the forward drew."""
    program = whence.capture(zoo.Checkpointed(dropout=0.1).train(), (FEATURES,), backward=total)
    drawn = [
        node for node in program.nodes() if "dropout" in str(node.target) or "bernoulli" in str(node.target)
    ]
    assert {origin_of(node).phase for node in drawn if "backward" not in str(node.target)} == {Phase.FORWARD}


class Encoder(nn.Module):
    """Asked for more than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.helped(self.linear(x))

    def helped(self, x: Tensor) -> Tensor:
        return x.sin()

    @property
    def scale(self) -> Tensor:
        return self.linear.weight.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.helped(x).cos()


class Asking(nn.Module):
    """Uses its encoder in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = Encoder(), nn.LayerNorm(4)

    def own(self, x: Tensor) -> Tensor:
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.encoder.encode(x)) @ self.encoder.scale
        x = self.norm.forward(x)
        return self.encoder(x).sqrt()


@pytest.mark.parametrize("reuse", [False, True])
def test_methods_that_are_asked_for_directly(reuse: bool) -> None:
    """What runs in a method of another module than the one that was called is its caller's, and inferred."""
    model = nn.Sequential(Asking(), Asking(), Asking())
    program = whence.capture(model, (torch.rand(2, 4),), backward=True, reuse=reuse)
    origins = [program.where(node) for node in program.nodes() if node.op == "call_function"]
    inferred = {
        (str(origin.calls[0]), origin.phase.value) for origin in origins if origin.quality == "inferred"
    }
    assert inferred == {(str(at), phase) for at in range(3) for phase in ("forward", "backward")}
    for at in range(3):
        found = {
            name: [
                str(program.where(node).quality)
                for node in program.select(f"{at}* :: aten.{name} :: forward")
            ]
            for name in ("exp", "tanh", "native_layer_norm", "sin", "cos", "sqrt", "addmm")
        }
        assert found == {
            **{name: ["exact"] for name in ("tanh", "cos", "sqrt", "addmm")},
            **{name: ["inferred"] for name in ("exp", "native_layer_norm")},
            "sin": ["inferred", "exact"],
        }

"""What autograd gives for a forward-only program: eager's gradients, or a refusal that says why."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import gradients, same_bits

Body = Callable[["Two", Tensor], Tensor]


class Two(nn.Module):
    """Two layers and a forward from outside."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def frozen_meanwhile(model: Two, x: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    hidden = model.first(x)
    model.first.requires_grad_(True)
    return model.second(hidden)


def frozen_by_the_flag(model: Two, x: Tensor) -> Tensor:
    model.first.weight.requires_grad = False
    hidden = model.first(x)
    model.first.weight.requires_grad = True
    return model.second(hidden)


def asked_of_the_input(model: Two, x: Tensor) -> Tensor:
    return model.first(x.requires_grad_())


def packed(model: Two, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(doubled, as_it_is):
        return model.first(x).sin()


def unpacked(model: Two, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, doubled):
        return model.first(x).sin()


def drawn_again(model: Two, x: Tensor) -> Tensor:
    return checkpoint(F.dropout, model.first(x), use_reentrant=False, preserve_rng_state=False)


def hooked_node(model: Two, x: Tensor) -> Tensor:
    hidden = model.first(x).sin()
    if hidden.grad_fn is not None:
        hidden.grad_fn.register_hook(lambda gradients, _: (gradients[0] * 2,))
    return hidden


def node_hooked_before(model: Two, x: Tensor) -> Tensor:
    hidden = model.first(x).sin()
    if hidden.grad_fn is not None:
        hidden.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return hidden


class Dirty(torch.autograd.Function):
    """Doubles in place, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 5


def view_written(model: Two, x: Tensor) -> Tensor:
    hidden = model.first(x) * 1
    Dirty.apply(hidden[0])
    return hidden.sin()


class Thrice(TorchDispatchMode):
    """Sines are three times as large, and autograd knows nothing of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.ops.aten.sin.default else result


def under_a_mode(model: Two, x: Tensor) -> Tensor:
    with Thrice():
        return model.first(x).sin()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (hooked_node, "the hook hooked_node.* on what autograd recorded"),
        (node_hooked_before, "the hook node_hooked_before.* on what autograd recorded"),
        (view_written, "the custom autograd function Dirty"),
        (under_a_mode, "the dispatch mode Thrice"),
        (frozen_meanwhile, r"requires_grad_\(False\) on the parameter first.weight"),
        (frozen_by_the_flag, r"requires_grad_\(False\) on the parameter first.weight"),
        (asked_of_the_input, r"requires_grad_\(True\) on .*args\[0\]"),
        (packed, "the hook doubled on saved tensors"),
        (unpacked, "the hook as_it_is on saved tensors"),
        (drawn_again, "a checkpoint that draws other numbers in the backward"),
    ],
)
def test_gradients_that_would_be_others_are_refused(body: Body, why: str) -> None:
    """What the model does to autograd on the side is named, by the flat module and the tree."""
    model, x = Two(body), torch.randn(2, 4)
    program = whence.capture(model, (x.clone(),))
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.NotDifferentiable, match=why):
            module(x.clone()).sum().backward()


def detached(model: Two, x: Tensor) -> Tensor:
    hidden = model.first(x)
    with_gradient = hidden * 2
    hidden.detach_()
    return model.second(hidden) + with_gradient


def begun_anew(model: Two, x: Tensor) -> Tensor:
    return model.second(model.first(x).detach().requires_grad_())


def offloaded(model: Two, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model.first(x).sin()


def asked_twice(model: Two, x: Tensor) -> Tensor:
    model.requires_grad_(True)
    return model.first(x)


def checkpointed(model: Two, x: Tensor) -> Tensor:
    hidden = checkpoint(model.first, x, use_reentrant=False, preserve_rng_state=False)
    return F.dropout(hidden, 0.0)


def all_scaled_before(model: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        for parameter in model.first.parameters():
            parameter.mul_(0.5)
    return model.first(x)


def all_loaded_before(model: Two, x: Tensor) -> Tensor:
    model.first.load_state_dict({name: value * 0.5 for name, value in model.first.state_dict().items()})
    return model.first(x)


@pytest.mark.parametrize(
    "body",
    [*(detached, begun_anew, offloaded, asked_twice, checkpointed), *(all_scaled_before, all_loaded_before)],
)
@pytest.mark.parametrize("backward", [False, True])
def test_gradients_are_eager_s(body: Body, backward: bool) -> None:
    """Bitwise, for each parameter; those that get none in eager get none."""
    model, x = Two(body), torch.randn(2, 4)
    program = whence.capture(model, (x,), backward=backward)
    before = copy.deepcopy(model.state_dict())
    model(x).sum().backward()
    expected = gradients(model)
    for module in (program.module(), program.unflatten()):
        model.zero_grad()
        model.load_state_dict(before)
        module(x).sum().backward()
        found = gradients(model)
        assert {name: None if g is None else g.tolist() for name, g in found.items()} == {
            name: None if g is None else g.tolist() for name, g in expected.items()
        }


def other_data(model: Two, x: Tensor) -> Tensor:
    hidden = torch.zeros(2, 4)
    hidden.data = model.first(x).data
    return hidden


def other_data_under_a_result(model: Two, x: Tensor) -> Tensor:
    hidden: Tensor = model.first(x)
    hidden.data = x * 2
    return hidden


def test_other_data_under_a_value() -> None:
    """`value.data = …` gives the new value; under one with a gradient it is refused, with the line."""
    model, x = Two(other_data), torch.randn(2, 4)
    found = whence.capture(model, (x,)).unflatten()(x)
    assert torch.equal(found, model(x)) and not found.requires_grad
    with pytest.raises(whence.UnsupportedMutation, match=r"test_differentiable\.py"):
        whence.capture(Two(other_data_under_a_result), (x,))


class Tripling(torch.autograd.Function):
    """Rounds, and says that it triples."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def off_in_places(model: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = model.first(x)
    with torch.set_grad_enabled(False):
        other = model.first(x)
    return model.second(hidden) + other + model.first.bias


def tripled(model: Two, x: Tensor) -> Tensor:
    return Tripling.apply(model.first(x)) + model.second(x)


def on_in_places(model: Two, x: Tensor) -> Tensor:
    hidden = model.first(x)
    with torch.enable_grad():
        taught = model.second(hidden).view(-1)
        (slope,) = torch.autograd.grad(taught.sum(), [model.second.weight], retain_graph=True)
    with torch.no_grad():
        other = model.second(hidden)
    return torch.cat([taught, other.flatten(), slope.flatten(), hidden.flatten()])


def on_throughout(model: Two, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        return model.second(model.first(x))


def by_a_decorator(model: Two, x: Tensor) -> Tensor:
    @torch.set_grad_enabled(False)
    def doubled_without(x: Tensor) -> Tensor:
        return model.second(x) * 2

    return model.first(x) + doubled_without(x)


def in_the_callers_mode(model: Two, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return model.second(model.first(x))


def given_back_beside_none(model: Two, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        hidden = model.first(x)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return model.second(hidden)


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "function", [on_in_places, on_throughout, in_the_callers_mode, given_back_beside_none, by_a_decorator]
)
@pytest.mark.parametrize("captured", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("called", [torch.no_grad, torch.enable_grad])
def test_gradients_that_the_model_turns_on(
    function: Callable[[Two, Tensor], Tensor], captured: Callable[[], Any], called: Callable[[], Any]
) -> None:
    """They are recorded for a caller who turned them off, too, and nothing else is then."""
    model, x = Two(function), torch.randn(2, 4)
    with captured():
        program = whence.capture(model, (x,))
    with program.track("nothing") as edit:
        edit.graph_module = copy.deepcopy(edit.graph_module)
    program = edit.program
    for module in (program.module(), program.unflatten(), whence.unflatten(edit.program)):
        with called():
            expected, found = model(x), module(x)
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected)
        if expected.requires_grad:
            model.zero_grad()
            expected.sum().backward()
            slopes = {name: None if g is None else g.tolist() for name, g in gradients(model).items()}
            model.zero_grad()
            found.sum().backward()
            assert {n: None if g is None else g.tolist() for n, g in gradients(model).items()} == slopes


def test_equal_layers_of_which_one_has_no_gradients() -> None:
    """Captured without gradients, only what the model says of itself tells them apart."""
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)
    )

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                with torch.no_grad() if number == 2 else nullcontext():
                    x = layer(x)
            return x

    model, x = Frozen().train(), torch.randn(2, 3, 8)
    with torch.no_grad():
        program = whence.capture(model, (x,))
    model(x).sum().backward()
    expected = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    program.unflatten()(x).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected
    assert expected and all(name.startswith("layers.3") for name in expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_gradients_of_a_program_captured_in_any_grad_mode(mode: Callable[[], Any]) -> None:
    """Where the model itself turns gradients off they stop; a custom function's backward is refused."""
    model, x = Two(off_in_places), torch.randn(2, 4)
    with mode():
        program = whence.capture(model, (x,))
        custom = whence.capture(Two(tripled), (x,))
    model(x).sum().backward()
    expected = {name: None if g is None else g.tolist() for name, g in gradients(model).items()}
    assert expected["first.weight"] is None
    for module in (program.module(), program.unflatten()):
        model.zero_grad()
        module(x).sum().backward()
        assert {n: None if g is None else g.tolist() for n, g in gradients(model).items()} == expected
    with pytest.raises(whence.NotDifferentiable, match="custom autograd function"):
        custom.unflatten()(x).sum().backward()


def forces(model: Two, x: Tensor) -> Tensor:
    x.requires_grad = True
    return torch.autograd.grad(model.first(x).sin().sum(), x, create_graph=True)[0]


def turned_off(model: Two, x: Tensor) -> Tensor:
    return model.first(x.requires_grad_(False))


@pytest.mark.parametrize(
    ("body", "before"), [(asked_of_the_input, False), (forces, False), (turned_off, True)]
)
@pytest.mark.parametrize("backward", [False, lambda out: out.sum()], ids=["forward", "joint"])
def test_an_argument_that_the_model_turns(body: Body, before: bool, backward: Any) -> None:
    """It is as it was given for those who check, and a run leaves it turned, with eager's gradient."""
    model, given = Two(body), torch.randn(2, 4)

    def argument() -> Tensor:
        return given.clone().requires_grad_(before)

    program = whence.capture(model, (argument(),), backward=backward)
    assert program.check(model, (argument(),)) == []
    assert program.verify(model, (argument(),)).ok
    expected = argument()
    loss = model(expected).sum()
    loss.backward() if backward else None
    for module in (program.module(), program.unflatten(), program.guarded(model)):
        x = argument()
        found = module(x)
        assert x.requires_grad is expected.requires_grad is not before
        if backward:
            found[0].backward()
            assert same_bits(x.grad, expected.grad)


class MadeAnew(nn.Module):
    """A buffer that each call makes of a parameter, as `__init__` does: braindecode's filters are such."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("made", self.scale.exp() * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.scale.exp() * self.scale
        return x * self.made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("form", ["module", "tree", "bound"])
def test_the_history_of_a_buffer_that_is_not_read_ends(form: str) -> None:
    """What made it has been differentiated, and a backward that has no gradient for it does not go there."""
    model, x = MadeAnew(), torch.randn(2, 4)
    for _ in range(2):
        model(x).sum().backward()
    expected, model.scale.grad = model.scale.grad, None
    program = whence.capture(model, (x,), backward=torch.sum)
    assert program.verify(model, (x,)).ok
    forms: dict[str, Any] = {
        "module": program.module,
        "tree": program.unflatten,
        "bound": lambda: program.bind(model),
    }
    run: Any = forms[form]()
    for _ in range(2):
        loss, _ = run(x)
        if form != "bound":
            loss.backward()
    assert same_bits(model.scale.grad, expected)

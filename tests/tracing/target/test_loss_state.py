"""What a loss function holds is state of the program, under names of its own."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whence
from tests.checks import same_bits

X = torch.randn(3, 4)


class Criterion(nn.Module):
    """A parameter, a module with a frozen one, a buffer, and statistics that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 2)
        self.linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("target", torch.randn(2))
        self.scale = torch.tensor(3.0)

    def forward(self, result: Tensor) -> Tensor:
        return (self.norm(self.linear(result * self.weight)) - self.target).square().sum() * self.scale


class Loss(nn.Module):
    """A model that has a `loss` and a parameter called `loss_weight` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss_weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def loss(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.loss_weight


def held(criterion: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways in which a loss function holds a module."""
    return {"module": criterion, "method": criterion.forward, "function": lambda y: criterion(y) * 1}


def rows(program: whence.Program) -> dict[str, tuple[str, str]]:
    """What is no state of a linear model: kind and path by name."""
    state = (row for row in program.signature.state if row.path not in ("weight", "bias"))
    return {row.name: (str(row.kind), row.path) for row in state}


def test_names() -> None:
    """Parameters, buffers and tensors of a loss module have their kind, a path, and the class around them."""
    program = whence.capture(nn.Linear(4, 4), (X,), backward=Criterion())
    assert rows(program) == {
        "p_loss_weight": ("parameter", "loss.weight"),
        "p_loss_linear_weight": ("parameter", "loss.linear.weight"),
        "p_loss_linear_bias": ("parameter", "loss.linear.bias"),
        "b_loss_norm_num_batches_tracked": ("buffer", "loss.norm.num_batches_tracked"),
        "p_loss_norm_weight": ("parameter", "loss.norm.weight"),
        "p_loss_norm_bias": ("parameter", "loss.norm.bias"),
        "b_loss_norm_running_mean": ("buffer", "loss.norm.running_mean"),
        "b_loss_norm_running_var": ("buffer", "loss.norm.running_var"),
        "b_loss_target": ("buffer", "loss.target"),
        "c_loss_scale": ("constant", "loss.scale"),
    }
    assert program.input("loss.norm.weight").module_type == "BatchNorm1d"
    assert program.output("loss.linear.weight").name == "grad_p_loss_linear_weight"


def test_names_of_variables() -> None:
    """What a function closes over, or a partial fixes, is known by its name; the model keeps its own."""
    model, weights = nn.Linear(4, 4), torch.rand(4)
    by = {"criterion": Criterion()}

    def loss(result: Tensor) -> Tensor:
        penalty = model.weight.square().sum()
        return (
            functional.cross_entropy(result, torch.arange(3), weights)
            + penalty
            + by["criterion"].weight.sum()
        )

    assert {path for _, path in rows(whence.capture(model, (X,), backward=loss)).values()} >= {
        "loss.weights",
        "loss.by.criterion.weight",
    }
    fixed = partial(functional.cross_entropy, target=torch.arange(3), weight=weights)
    assert {path for _, path in rows(whence.capture(model, (X,), backward=fixed)).values()} == {
        "loss.target",
        "loss.weight",
    }


@pytest.mark.parametrize("way", ["module", "method", "function"])
def test_the_loss_trains_as_in_eager(way: str) -> None:
    """Flat module, tree and bound program fill gradients and write statistics of the loss as eager does."""
    model, criterion = nn.Linear(4, 4), Criterion()
    program = whence.capture(model, (X,), backward=held(criterion)[way])
    before = [deepcopy(criterion.state_dict()), deepcopy(model.state_dict())]

    def run(call: Callable[[Tensor], Any]) -> list[Tensor | None]:
        criterion.load_state_dict(before[0])
        model.load_state_dict(before[1])
        model.zero_grad()
        criterion.zero_grad()
        loss = call(X)
        (loss[0] if isinstance(loss, tuple) else loss).backward() if call != bound else None
        values = [*criterion.state_dict().values(), *model.state_dict().values()]
        found = [
            None if p.grad is None else p.grad.clone() for p in (*criterion.parameters(), *model.parameters())
        ]
        return [*(value.clone() for value in values), *found]

    bound = program.bind(model)
    expected = run(lambda x: held(criterion)[way](model(x)))
    for call in (program.module(), program.unflatten(), bound):
        found = run(call)
        assert all(
            a is b if a is None or b is None else same_bits(a, b)
            for a, b in zip(expected, found, strict=True)
        )


def test_verify_compares_what_the_loss_holds_and_leaves_it() -> None:
    """`verify` looks at the gradients and the state of the loss, too, and gives everything back."""
    model, criterion = nn.Linear(4, 4), Criterion()
    program = whence.capture(model, (X,), backward=criterion)
    before = deepcopy(criterion.state_dict())
    result = program.verify(model, (X,))
    assert result.ok and "loss.linear.weight" in {row.name for row in result.rows if row.kind == "gradient"}
    assert "loss.norm.running_mean" in {row.name for row in result.rows if row.kind == "state"}
    assert all(p.grad is None for p in criterion.parameters())
    assert all(map(same_bits, criterion.state_dict().values(), before.values()))


@pytest.mark.parametrize("state", ["inputs", "attributes"])
def test_copies_train_copies(state: str) -> None:
    """A tree with tensors of its own, of whatever kind, has a loss of its own."""
    model, criterion = nn.Linear(4, 4), Criterion()
    program = whence.capture(model, (X,), backward=criterion, state=state)
    expected = criterion(model(X))
    criterion.norm.reset_running_stats()
    for tree in (program.unflatten(copy=True), deepcopy(program.unflatten()), deepcopy(program).module()):
        assert [*tree.state_dict()] == [*model.state_dict()]
        loss, _ = tree(X)
        loss.backward()
        assert same_bits(loss.detach(), expected.detach())
        assert criterion.weight.grad is None and not criterion.norm.state_dict()["running_mean"].any()


def test_names_that_the_model_has() -> None:
    """A model with a `loss` keeps it; no two inputs have one name."""
    model, criterion = Loss(), Criterion()
    program = whence.capture(model, (X,), backward=criterion)
    assert program.input("loss_weight").kind == "parameter"
    assert program.input("loss_.weight").module == whence.ModulePath(("loss_",))
    owned = program.unflatten(onto=model)
    assert owned.loss() == "mine"
    criterion.norm.reset_running_stats()
    assert same_bits(owned(X)[0].detach(), criterion(model(X)).detach())
    assert program.verify(model, (X,)).ok


def test_names_that_collide_as_placeholders() -> None:
    """`loss.a_b` and `loss.a.b` are two inputs."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_b, self.a = nn.Parameter(torch.ones(4)), nn.ParameterDict({"b": torch.full((4,), 2.0)})

        def forward(self, result: Tensor) -> Tensor:
            return (result * self.a_b * self.a["b"]).sum()

    model = nn.Linear(4, 4)
    program = whence.capture(model, (X,), backward=Twice())
    assert {row.path for row in program.signature.state} >= {"loss.a_b", "loss.a.b"}
    assert program.verify(model, (X,)).ok


def test_a_converted_loss_is_refused() -> None:
    """The state of the loss is looked at as the model's is."""
    model, criterion = nn.Linear(4, 4), Criterion()
    tree = whence.capture(model, (X,), backward=criterion).unflatten()
    criterion.double()
    with pytest.raises(whence.CallError, match=r"loss\.\S+ is torch\.float64"):
        tree(X)

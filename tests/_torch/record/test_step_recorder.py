"""Numbers that only a run knows reach operators whose kernels take floats."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import whence


class Functions(TorchFunctionMode):
    """Writes down the functions that are called."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Writes down the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


KINDS: list[tuple[type[Optimizer], str]] = [
    (Adam, "_fused_adam_"),
    (AdamW, "_fused_adamw_"),
    (SGD, "_fused_sgd_"),
    (Adagrad, "_fused_adagrad_"),
]


@pytest.mark.canary("torch._fused_adam_", "torch._fused_adamw_", "torch._fused_sgd_", "torch._fused_adagrad_")
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_fused_optimizers_call_a_function_that_is_an_operator(kind: Any, name: str) -> None:
    """The function and the operator have one name, and take the rate by its name, as a float."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with Functions() as functions, Operators() as operators:
        kind([weight], lr=0.1, fused=True).step()
    operator = getattr(torch.ops.aten, name).default
    assert getattr(torch, name) in functions.called
    assert operator in operators.ran
    assert str(next(row.type for row in operator._schema.arguments if row.name == "lr")) == "float"


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_fused_kernel_is_given_the_rate_as_a_node(kind: Any, name: str) -> None:
    """It is an input of the program, which the operator reads."""
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step(torch.ones(1, 2))
    program = whence.capture_step(step, (torch.ones(1, 2),), model=model, optimizer=optimizer)
    rate = program.input("optimizer.param_groups[0]['lr']").name
    (updating,) = [node for node in program.nodes() if name.rstrip("_") in str(node.target)]
    assert str(updating.kwargs["lr"]) == rate

"""Models, inputs and losses that a capture refuses, or that fail by themselves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import whence
from tests.checks import Backward


class Doing(nn.Module):
    """A linear layer and a buffer, used by a function."""

    table: Tensor

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.linear.weight.grad = torch.ones(4, 4)
        self.linear.register_forward_hook(_no_hook)

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def _no_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Changes nothing."""


@dataclass
class Box:
    """A class that no one registered with pytree."""

    content: Any


@dataclass(frozen=True)
class Failure:
    """What is captured, how, and the error that it must raise."""

    name: str
    model: Callable[[], Any]
    error: type[BaseException]
    args: Any = (torch.ones(2, 4),)
    kwargs: Any = field(default_factory=dict)
    backward: Backward = False

    def capture(self, model: Any) -> whence.Program:
        return whence.capture(model, self.args, self.kwargs, backward=self.backward)


class OwnError(Exception):
    """The model's own."""


class Failing(nn.Module):
    """Raises its own error deep inside, after some work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Doing(_raise))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def _raise(m: Doing, x: Tensor) -> Tensor:
    m.table.add_(1)
    torch.dropout(m.linear(x), 0.3, True)
    raise OwnError("no more")


def linear(m: Doing, x: Tensor) -> Any:
    return m.linear(x)


def _nested(m: Doing, x: Tensor) -> Tensor:
    whence.capture(m.linear, (x,))
    return m.linear(x)


def _nested_loss(output: Tensor) -> Tensor:
    whence.capture(nn.Linear(4, 4), (torch.ones(2, 4),))
    return output.sum()


def _script() -> Any:
    return torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4), check_trace=False)


def _doing(body: Callable[..., Any]) -> Callable[[], Doing]:
    return partial(Doing, body)


X = torch.ones(2, 4)
BAD_CALLS = (
    Failure("number", lambda: 3, whence.NotCallable),
    Failure("nothing", lambda: None, whence.NotCallable),
    Failure("missing argument", _doing(linear), whence.InputMismatch, args=()),
    Failure("extra argument", _doing(linear), whence.InputMismatch, args=(X, X)),
    Failure("unknown keyword", _doing(linear), whence.InputMismatch, kwargs={"y": X}),
    Failure("args a tensor", _doing(linear), whence.InputMismatch, args=X),
    Failure("args a list", _doing(linear), whence.InputMismatch, args=[X]),
    Failure("kwargs a list", _doing(linear), whence.InputMismatch, kwargs=[X]),
    Failure("unregistered input", _doing(linear), whence.UnsupportedInput, args=(Box(X),)),
    Failure("unregistered output", _doing(lambda m, x: Box(m.linear(x))), whence.UnsupportedInput),
    Failure("generator output", _doing(lambda m, x: (m.linear(x) for _ in "a")), whence.UnsupportedInput),
)
DATA_DEPENDENT = tuple(
    Failure(name, _doing(body), whence.DataDependent)
    for name, body in {
        "if": lambda m, x: m.linear(x) if x.sum() > 0 else x,
        "while": lambda m, x: next(m.linear(x) for _ in iter(lambda: bool(x.sum() > 0), False)),
        "item": lambda m, x: m.linear(x) if x.sum().item() > 0 else x,
        "int": lambda m, x: m.linear(x) * int(x.sum()),
        "float": lambda m, x: m.linear(x) * float(x.sum()),
        "range": lambda m, x: [m.linear(x) for _ in range(x.sum().long())],
        "index": lambda m, x: [x, m.linear(x)][x.sum().long()],
        "item of a parameter": lambda m, x: m.linear(x) if m.linear.bias[0].item() > 0 else x,
        "tolist": lambda m, x: m.linear(x) if x.tolist()[0][0] > 0 else x,
        "tolist of a buffer": lambda m, x: m.linear(x) * m.table.tolist()[0],
        "numpy": lambda m, x: m.linear(x) * torch.from_numpy(x.numpy()),
        "numpy of a parameter": lambda m, x: m.linear(x) * torch.from_numpy(m.linear.bias.detach().numpy()),
        "asarray": lambda m, x: m.linear(x) * torch.from_numpy(np.asarray(x)),
        "dlpack": lambda m, x: m.linear(torch.from_dlpack(x)),
        "dlpack handed on": lambda m, x: torch.from_dlpack(torch.to_dlpack(m.linear(x))),
        "dlpack of a buffer": lambda m, x: m.linear(x) + from_dlpack(to_dlpack(m.table)),
        "dlpack method": lambda m, x: (x.__dlpack__(), m.linear(x))[1],
        "dlpack to numpy": lambda m, x: m.linear(x) * torch.from_numpy(np.from_dlpack(x)),
        "pickled": lambda m, x: pickle.loads(pickle.dumps(m.linear(x).detach())) * 2,
        "address": lambda m, x: m.linear(x) * (x.data_ptr() % 64),
        "address of a parameter": lambda m, x: m.linear(x) * (m.linear.weight.data_ptr() % 64),
        "one memory": lambda m, x: m.linear(x) * x.is_set_to(m.table),
        "memory": lambda m, x: m.linear(x) * x.untyped_storage().nbytes(),
        "memory of a parameter": lambda m, x: m.linear(x) * m.linear.weight.storage().size(),
        "equal": lambda m, x: m.linear(x) if torch.equal(x, x) else x,
        "allclose": lambda m, x: m.linear(x) if torch.allclose(x, x) else x,
        "nonzero": lambda m, x: m.linear(x) if len(x.sum(1).nonzero()) > 1 else x,
        "mask": lambda m, x: m.linear(x) if len(x[x > 0]) > 3 else x,
        "unique": lambda m, x: m.linear(x) if len(torch.unique(x)) > 3 else x,
        "format": lambda m, x: (f"{x.sum():.2f}", m.linear(x))[1],
        "size": lambda m, x: m.linear(x).view(torch.Size([x.sum().long(), -1])),
    }.items()
)
BAD_LOSSES = (
    Failure("vector loss", _doing(linear), whence.InvalidLoss, backward=lambda output: output),
    Failure("number loss", _doing(linear), whence.InvalidLoss, backward=lambda output: 3.0),  # type: ignore[arg-type, return-value]
    Failure("nothing loss", _doing(linear), whence.InvalidLoss, backward=lambda output: None),  # type: ignore[arg-type, return-value]
    Failure(
        "detached loss", _doing(linear), whence.InvalidLoss, backward=lambda output: output.sum().detach()
    ),
    Failure("integer loss", _doing(linear), whence.InvalidLoss, backward=lambda output: output.argmax()),
    Failure("complex loss", _doing(linear), whence.InvalidLoss, backward=lambda output: output.sum() * 1j),
    Failure("frozen", lambda: Doing(linear).requires_grad_(False), whence.InvalidLoss, backward=True),
    Failure(
        "value read",
        _doing(linear),
        whence.DataDependent,
        backward=lambda o: o.sum() if o.sum() > 0 else o.mean(),
    ),
)
OWN_ERRORS = (
    Failure("model raises", Failing, OwnError),
    Failure("model raises in joint", Failing, OwnError, backward=True),
    Failure("loss raises", _doing(linear), AttributeError, backward=lambda output: output.nothing),
    Failure("wrong shape", _doing(linear), RuntimeError, args=(torch.ones(2, 5),)),
    Failure("backward raises", _doing(lambda m, x: _Broken.apply(m.linear(x))), OwnError, backward=True),
    Failure("interrupted", _doing(lambda m, x: _interrupt()), KeyboardInterrupt),
)
NESTED = (
    Failure("nested in the model", _doing(_nested), whence.NestedCapture),
    Failure("nested in the loss", _doing(linear), whence.NestedCapture, backward=_nested_loss),
)
ALL = (*BAD_CALLS, *DATA_DEPENDENT, *BAD_LOSSES, *OWN_ERRORS, *NESTED)


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OwnError("no gradient")

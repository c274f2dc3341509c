"""Every mode of torch that a model is captured in beside every mode that its program runs in.

A run is eager's in that mode, bit for bit, or it is refused by name; and `check` knows where it would not be.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import same_bits
from tests.models import Inputs, ModelCase, mean_sine, sampled_cases
from whence._torch.pytrees import tree_flatten

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


class Asking(nn.Module):
    """Computes otherwise where its question is answered by yes."""

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(zoo.WIDTH, 4), question

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.sin() if self.question(y) else y.cos()


def goes(question: Callable[[Tensor], Any]) -> Callable[[Tensor], bool]:
    """Whether PyTorch does what it is asked for."""

    def answer(y: Tensor) -> bool:
        try:
            question(y)
        except RuntimeError:
            return False
        return True

    return answer


def made(y: Tensor) -> Tensor:
    return torch.zeros(y.shape, requires_grad=True) + y


class Scaling(nn.Module):
    """Scales a parameter in place, where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(zoo.WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.sin() if goes(lambda weight: weight.mul_(0.5))(self.layer.weight) else y.cos()


class Lambda(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Doubled(torch.autograd.Function):
    """The same, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def saved_half(y: Tensor) -> Tensor:
    """A sine, whose gradient comes from half of what it is of."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0.5, lambda saved: saved):
        return y.sin()


class Viewing(nn.Module):
    """Looks into a parameter, as a view; `inside` a mode of its own."""

    def __init__(self, inside: Callable[[], AbstractContextManager[Any]] = torch.enable_grad) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 1, zoo.WIDTH)), nn.Linear(zoo.WIDTH, 4)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with self.inside():
            first, *_ = self.token.expand(len(x), 2, -1).split(1, 1)
        return self.layer(torch.cat([first.clone(), x], 1))


class Attending(nn.Module):
    """Attends to itself, and asks for no weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(zoo.WIDTH, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return value


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(zoo.WIDTH, 4, 64, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def features() -> Inputs:
    return (torch.randn(2, 5, zoo.WIDTH),), {}


def masked() -> Inputs:
    return features()[0], {"src_key_padding_mask": torch.arange(5) > torch.tensor([[4], [2]])}


def case(name: str, build: Callable[[], nn.Module], inputs: Callable[[], Inputs] = features) -> ModelCase:
    return ModelCase(name, build, inputs, mean_sine)


CASES = (
    case("encoder", encoder),
    case("encoder_masked", encoder, masked),
    case("encoder_norm_first", partial(encoder, norm_first=True, activation="gelu")),
    case("encoder_sequence_first", partial(encoder, batch_first=False)),
    case("encoder_frozen", lambda: encoder().requires_grad_(False)),
    case("attention", partial(Attending, batch_first=True)),
    case("attention_sequence_first", Attending),
    case("asks_grad", partial(Asking, lambda _: torch.is_grad_enabled())),
    case("asks_inference", partial(Asking, lambda _: torch.is_inference_mode_enabled())),
    case("asks_autocast", partial(Asking, lambda _: torch.is_autocast_enabled("cpu"))),
    case("asks_requires_grad", partial(Asking, lambda y: y.requires_grad)),
    case("asks_is_leaf", partial(Asking, lambda y: y.is_leaf)),
    case("asks_is_inference", partial(Asking, lambda y: y.is_inference())),
    case("asks_parameter", partial(Asking, lambda _: False)),
    case("asks_what_it_made", lambda: Asking(lambda y: made(y).requires_grad).requires_grad_(False)),
    case("counts_writes", partial(Asking, goes(lambda y: y._version))),
    case("copies", partial(Asking, goes(copy.deepcopy))),
    case("scales_a_parameter", Scaling),
    case("views", Viewing),
    case("views_in_inference", partial(Viewing, torch.inference_mode)),
    case("views_without_grad", partial(Viewing, torch.no_grad)),
)
ROWS = [pytest.param(row, id=row.name) for row in CASES] + sampled_cases()


@cache
def captured_in(row: ModelCase, mode: str) -> whence.Program:
    model, args, kwargs = row.make()
    with MODES[mode]():
        return whence.capture(model, args, kwargs)


def runs(row: ModelCase, run: Callable[[nn.Module], Callable[..., Any]]) -> list[Any] | None:
    """What comes of a run from a fixed seed; None where it is refused by name."""
    model, args, kwargs = row.make()
    torch.manual_seed(3)
    try:
        return tree_flatten(run(model)(*args, **kwargs))[0]
    except (whence.CallError, whence.StaleCapture):
        return None


def is_eager(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.sample(20)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ROWS)
def test_a_run_is_eager_or_refused(row: ModelCase, mode: str) -> None:
    """In no mode does a program compute something else than eager does there, and say nothing."""
    try:
        program = captured_in(row, mode)
    except (whence.CaptureError, RuntimeError) as error:
        assert is_refused(row, mode, error)
        return
    forms: tuple[Callable[[nn.Module], Callable[..., Any]], ...] = (
        program.bind,
        lambda _: program.module(copy=True),
        lambda _: program.unflatten(copy=True),
    )
    wrong = []
    for other, inside in MODES.items():
        with inside():
            try:
                expected = runs(row, is_eager)
            except RuntimeError:
                continue  # no kernel of this machine's computes in bfloat16
            model, args, kwargs = row.make()
            found = [runs(row, form) for form in forms]
            violations = program.check(model, args, kwargs)
        if any(each is not None and not alike(expected, each) for each in found):
            wrong.append(f"{other}: other bits")
        if None in found and not violations:
            wrong.append(f"{other}: refused, and check finds nothing")
        if None in found and other == mode:
            wrong.append(f"{other}: refused where it was captured")
    assert wrong == []


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("function", [Doubled.apply, saved_half])
def test_a_derivative_of_its_own_is_missed_where_gradients_are_recorded(
    function: Callable[[Tensor], Tensor], mode: str
) -> None:
    """A capture without gradients sees that there is one, and its program is for runs without."""
    model = nn.Sequential(nn.Linear(zoo.WIDTH, 4), Lambda(function))
    with MODES[mode]():
        program = whence.capture(model, (x := torch.randn(2, zoo.WIDTH),))
        assert program.check(model, (x,)) == []
    assert [row.guard.what for row in program.check(model, (x,))] == ["grad mode"]


def is_refused(row: ModelCase, mode: str, error: Exception) -> bool:
    """Whether a capture may fail in a mode: as eager does, or where autocast casts out of sight."""
    if not isinstance(error, whence.CaptureError):
        with MODES[mode](), pytest.raises(type(error)):
            runs(row, is_eager)
        return True
    return mode == "autocast" and "casts inside" in str(error)


def alike(expected: list[Any] | None, found: list[Any]) -> bool:
    pairs = zip(expected or [], found, strict=True)
    return all(same_bits(*pair) for pair in pairs)

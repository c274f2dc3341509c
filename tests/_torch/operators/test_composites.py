"""Composites stay whole in forward programs, so that every run takes them apart as eager does there."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import gradients
from whence._torch.autograd.switches import switched
from whence._torch.record import direct_recording, recorder

X = torch.randn(2, 3, 4)


class Using(nn.Module):
    """Calls one function on its input and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.bias)


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "linear": F.linear,
    "linear by name": lambda x, w, b: F.linear(bias=b, input=x, weight=w),
    "linear without bias": lambda x, w, _: F.linear(x, w),
    "matmul": lambda x, w, _: torch.matmul(x, w),
    "matmul of a method": lambda x, w, _: x.matmul(w),
    "matmul of a sign": lambda x, w, _: x @ w,
    "matmul of vectors": lambda _, w, b: b @ w,
    "attention": lambda x, w, _: F.scaled_dot_product_attention(x @ w, x, x),
    "causal attention": lambda x, _w, _b: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
    "attention that scales to nothing": lambda x, _w, _b: F.scaled_dot_product_attention(x, x, x, scale=0.0),
    "attention with a mask": lambda x, _w, b: F.scaled_dot_product_attention(x, x, x, b[:3]),
    "grouped attention": lambda x, _w, _b: F.scaled_dot_product_attention(
        x.view(1, 2, 3, 4), x.view(1, 2, 3, 4)[:, :1], x.view(1, 2, 3, 4)[:, :1], enable_gqa=True
    ),
    "attention with dropout": lambda x, w, _: F.scaled_dot_product_attention(x @ w, x, x, dropout_p=0.5),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (4,), w[0], b, 1e-3),
    "layer_norm of numbers": lambda x, *_: F.layer_norm(x, (4,)),
    "dropout": lambda x, w, _: F.dropout(x * w[0], 0.5),
}


def operators(program: whence.Program) -> set[str]:
    targets = (node.target for node in program.nodes())
    return {target.overloadpacket.__name__ for target in targets if isinstance(target, OpOverload)}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("captured", [False, True])
def test_right_in_every_grad_mode(name: str, captured: bool) -> None:
    """Captured with gradients or without, it runs bitwise with them and without, and trains."""
    model = Using(KEPT[name])
    with torch.set_grad_enabled(captured):
        program = whence.capture(model, (X,))
    assert operators(program) & {"linear", "matmul", "scaled_dot_product_attention", "layer_norm", "dropout"}
    for runs in (False, True):
        with torch.set_grad_enabled(runs):
            assert program.verify(model, (X,)).ok


SPECTRAL: dict[str, Callable[[Tensor], Any]] = {
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda w: torch.linalg.eigvalsh(w @ w.mT, "U"),
    "spectral norm": lambda w: torch.linalg.norm(w, 2, keepdim=True),
    "nuclear norm": lambda w: torch.linalg.norm(w, ord="nuc", dim=(0, 1)),
    "smallest value": lambda w: torch.linalg.matrix_norm(w[None], ord=-2),
    "nuclear norm of matrices": lambda w: torch.linalg.matrix_norm(w, "nuc"),
    "condition": torch.linalg.cond,
    "condition by a norm": lambda w: torch.linalg.cond(w, "nuc"),
    "norm of a method": lambda w: w.norm(p="nuc"),
    "norm of two dimensions": lambda w: torch.norm(w, p="nuc", dim=(0, 1)),
    "nuclear_norm": torch.nuclear_norm,
    "svd": lambda w: torch.svd(w, compute_uv=False)[1],
}


@pytest.mark.filterwarnings("ignore:.*nuclear_norm is deprecated")
@pytest.mark.parametrize("name", SPECTRAL)
def test_singular_values_are_right_in_every_grad_mode(name: str) -> None:
    """Eager finds vectors, too, where the values will be differentiated, and other last bits of these."""
    torch.manual_seed(0)
    model = Using(lambda x, w, _: SPECTRAL[name](w * x))
    x = torch.rand(4, 4) + 1
    program = whence.capture(model, (x,))
    again = whence.capture(program.module(), (x,))
    assert [node.target for node in again.nodes()] == [node.target for node in program.nodes()]
    for runs in (False, True):
        with torch.set_grad_enabled(runs):
            assert program.verify(model, (x,)).ok and torch.equal(again.module()(x), model(x))


@pytest.mark.parametrize("order", [None, "fro", 1, 2, "nuc"])
def test_norms_are_those_of_an_export(order: Any) -> None:
    """Of numbers and of texts, which are two operators."""
    program = whence.capture(lambda x: torch.linalg.norm(x[0], order), (X,))
    exported = torch.export.export(Using(lambda x, _w, _b: torch.linalg.norm(x[0], order)), (X,))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == targets


@pytest.mark.parametrize("name", KEPT)
def test_operations_are_those_of_an_export(name: str) -> None:
    """Where nothing else is in the model, the program has the operators that `torch.export` has."""
    model = Using(KEPT[name]).eval()
    exported = torch.export.export(model, (X,), strict=False)
    theirs = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    ours = [
        str(node.target) for node in whence.capture(model, (X,)).graph.nodes if node.op == "call_function"
    ]
    assert ours == theirs


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5),
    "lstm both ways": lambda: nn.LSTM(4, 3, bidirectional=True),
    "gru": lambda: nn.GRU(4, 4, 2, batch_first=True),
    "tanh": lambda: nn.RNN(4, 4),
    "relu": lambda: nn.RNN(4, 4, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("captured", [False, True])
def test_recurrent_networks(name: str, captured: bool) -> None:
    """One operator with several results; in every grad mode, and trained."""
    model = RECURRENT[name]()
    with torch.set_grad_enabled(captured):
        program = whence.capture(model, (X,))
    assert operators(program) & {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    for runs in (False, True):
        with torch.set_grad_enabled(runs):
            assert program.verify(model, (X,)).ok


class Force(nn.Module):
    """Gives the gradient of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.second(torch.tanh(self.first(x))).sum()
        try:
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        except ValueError:
            force = x
        return energy, force


def test_composite_that_the_model_looks_into() -> None:
    """A backward inside the model needs the parts: all composites are taken apart."""
    model, x = Force(), torch.randn(2, 4, requires_grad=True)
    program = whence.capture(model, (x,))
    assert "linear" not in operators(program)
    assert not any(row.kind.value == "constant" for row in program.signature.inputs)
    assert program.verify(model, (x,)).ok


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, _: torch.vmap(lambda row: F.linear(row, w))(x),
        lambda x, w, _: F.dropout(x * w[0], 0.5, training=False),
        lambda x, w, _: F.dropout(x * w[0], 0.5, inplace=True),
    ],
    ids=["for many", "off", "in place"],
)
def test_what_is_taken_apart(function: Any) -> None:
    """Functions that run for many at once, and dropout that is none or writes to its argument."""
    model = Using(function)
    program = whence.capture(model, (X,))
    assert not operators(program) & {"linear", "dropout"}
    assert program.verify(model, (X,)).ok


def test_taken_apart_under_autocast() -> None:
    """What is cast is in the graph."""
    model = Using(F.linear)
    with torch.autocast("cpu", torch.bfloat16):
        program = whence.capture(model, (X,))
        assert "linear" not in operators(program)
        assert program.verify(model, (X,)).ok


def test_call_that_does_not_fit() -> None:
    """The function's own error."""
    with pytest.raises(TypeError):
        whence.capture(Using(lambda x, *_: F.linear(x)), (X,))  # type: ignore[call-arg]


@pytest.mark.parametrize("batch_first", [False, True])
def test_inside_multi_head_attention(batch_first: bool) -> None:
    """PyTorch's own attention runs its functions out of sight of function modes; they are whole, too."""
    model = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    program = whence.capture(model, (X, X, X), {"need_weights": False})
    assert {"linear", "scaled_dot_product_attention"} <= operators(program)
    model.zero_grad()
    model(X, X, X, need_weights=False)[0].sum().backward()
    expected = gradients(model)
    model.zero_grad()
    program.unflatten()(X, X, X, need_weights=False)[0].sum().backward()
    assert all(torch.equal(found, expected[name]) for name, found in gradients(model).items())  # type: ignore[arg-type]


def test_mask_that_is_trained_after_a_capture_without_gradients() -> None:
    """Attention whose mask needs a gradient runs another kernel: each run chooses its own."""
    model = Using(KEPT["attention with a mask"])
    with torch.no_grad():
        program = whence.capture(model, (X,))
    model(X).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    program.unflatten()(X).sum().backward()
    assert str(gradients(model)) == str(expected)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_open_sizes(size: int, dim: int) -> None:
    """Sizes of attention are open down to none."""
    model = Using(KEPT["causal attention"])
    program = whence.capture(model, (X,), dynamic_shapes=({dim: torch.export.Dim.AUTO},))
    x = torch.randn(size, 3, 4) if dim == 0 else torch.randn(2, size, 4)
    assert torch.equal(program.unflatten()(x), model(x))


SHAPED: dict[str, Callable[[Tensor], Any]] = {
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "reshaped": lambda x: x.transpose(0, 1).reshape(-1, 4),
    "reshaped by a function": lambda x: torch.reshape(x.transpose(0, 1), (-1,)),
    "flat": lambda x: x.transpose(0, 1).flatten(1),
    "flat by a function": lambda x: torch.flatten(x.transpose(0, 1)),
    "attention of PyTorch's": lambda x: nn.MultiheadAttention(4, 2)(x, x, x, need_weights=False)[0].shape,
}


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("dim", [0, 1])
def test_copies_are_decided_in_every_run(name: str, dim: int) -> None:
    """At a size of 1 eager takes a view; the program, too, and nothing is ruled out."""
    program = whence.capture(SHAPED[name], (X,), dynamic_shapes=({dim: torch.export.Dim.AUTO},))
    for size in (0, 1, 2, 7):
        x = torch.randn(size, 3, 4) if dim == 0 else torch.randn(2, size, 4)
        if 0 not in x.shape or name not in ("reshaped", "attention of PyTorch's"):
            found, expected = program.module()(x), SHAPED[name](x)
            assert str(found) == str(expected)


def written_afterwards(x: Tensor) -> Any:
    y = x.transpose(0, 1).contiguous()
    return y.add_(1), x * 2


def source_written_afterwards(x: Tensor) -> Any:
    h = x * 2
    y = h.transpose(0, 1).reshape(-1)
    h.add_(1)
    return y, h


@pytest.mark.parametrize("function", [written_afterwards, source_written_afterwards])
def test_view_or_copy_that_is_written(function: Callable[[Tensor], Any]) -> None:
    """Where it matters whether it was a view, the size that makes one is ruled out."""
    program = whence.capture(function, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    x = torch.randn(5, 3, 4)
    assert str(program.module()(x.clone())) == str(function(x.clone()))
    with pytest.raises(whence.CallError, match="other than 1"):
        program.module()(torch.randn(1, 3, 4))


class Off(nn.Module):
    """Calls a function where gradients are off, and goes on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.last = Using(function), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.inner(x)
        return self.last(hidden) + self.inner(x).sum()


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "name", [name for name in KEPT if name not in ("matmul of vectors", "grouped attention")]
)
@pytest.mark.parametrize("captured", [False, True])
def test_gradients_stop_where_the_model_stops_them(name: str, captured: bool) -> None:
    """Inside `no_grad` a composite passes no gradient on, to its input or to its weights."""
    model = Off(KEPT[name])
    with torch.set_grad_enabled(captured):
        program = whence.capture(model, (X,))
    assert program.verify(model, (X,)).ok


class Twice(torch.autograd.Function):
    """A linear that says its gradient is twice what arrives."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def test_custom_function_that_was_captured_without_gradients() -> None:
    """Its own backward is not in the program: asking for it raises."""
    model = Using(lambda x, w, _: Twice.apply(x, w))
    with torch.no_grad():
        program = whence.capture(model, (X,))
    with pytest.raises(whence.NotDifferentiable):
        program.unflatten()(X.clone().requires_grad_()).sum().backward()


def test_attention_that_the_model_chooses() -> None:
    """Which kernel attention takes is in the program where the model turns switches for it."""

    def chosen(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x @ w, x, x)

    model = Using(chosen)
    program = whence.capture(model, (X,))
    assert "scaled_dot_product_attention" not in operators(program)
    assert program.verify(model, (X,)).ok


@pytest.mark.parametrize(
    ("name", "value", "run", "is_refused"),
    [
        ("default dtype", torch.float64, lambda x: x * torch.ones(4), True),
        ("default dtype", torch.float64, lambda x: x * (torch.arange(4, dtype=torch.int64) / 3), True),
        ("default dtype", torch.float64, lambda x: x * torch.ones(4, dtype=torch.float32), False),
        ("default dtype", torch.float64, lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), False),
        ("mkldnn", False, lambda x: x @ x.mT, True),
        ("deterministic algorithms", 2, lambda x: x * torch.empty(4).zero_(), True),
        ("float32 matmul precision", "medium", lambda x: x @ x.mT, True),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_switches_that_the_model_turns(
    name: str, value: Any, run: Callable[[Tensor], Tensor], is_refused: bool, backward: bool
) -> None:
    """A program runs with the switches of its caller: operators that look at one are refused, by its name."""

    def turned(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        with switched({name: value}):
            return run(x @ w if name == "default dtype" else x)

    model = Using(turned)
    with pytest.raises(whence.UnsupportedOperator, match=name) if is_refused else nullcontext():
        assert whence.capture(model, (X,), backward=backward).verify(model, (X,)).ok


def test_views_of_inputs_captured_without_gradients() -> None:
    """They are no leaves of the model's: gradients reach the input when the program runs with them."""
    with torch.no_grad():
        program = whence.capture(lambda x: (x.view(-1), x * 2), (X,))
    x = X.clone().requires_grad_()
    program.module()(x)[0].sum().backward()
    assert x.grad is not None


def test_dropout_of_nothing() -> None:
    """It gives its argument."""
    model, x = Using(lambda x, w, b: (F.dropout(x, 0.5), F.linear(x, w, b))), torch.randn(0, 4)
    program = whence.capture(model, (x,))
    assert "dropout" not in operators(program)
    program.module()(x.requires_grad_())[1].sum().backward()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_recurrent_networks_of_open_sizes(size: int) -> None:
    """They are taken apart, for batches of one, too."""
    model = nn.GRU(4, 4)
    program = whence.capture(model, (torch.randn(3, 4, 4),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    assert program.verify(model, (torch.randn(3, size, 4),)).ok


def test_older_checkpoint_that_was_captured_without_gradients() -> None:
    """It turns gradients off itself, and its backward is none of the program's: asking for it raises."""
    model = Using(lambda x, w, _: checkpoint(F.linear, x, w, use_reentrant=True))
    with torch.no_grad():
        program = whence.capture(model, (X,))
    with pytest.raises(whence.NotDifferentiable):
        program.unflatten()(X.clone().requires_grad_()).sum().backward()


def test_backward_hooks_of_a_capture_without_gradients() -> None:
    """Eager calls them in a run with gradients, and the program has none: asking for them raises."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_full_backward_hook(lambda *_: None)
    with torch.no_grad():
        program = whence.capture(model, (X,))
    with pytest.raises(whence.NotDifferentiable, match="backward hooks of 0"):
        program.unflatten()(X).sum().backward()


class Picture(nn.Module):
    """Operators whose arguments are in another order than their functions'."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch, self.group = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        for values in self.batch.state_dict().values():
            values.copy_(torch.rand(values.shape) + 0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.max_pool2d(self.group(self.batch(self.convolution(x))), 2).flatten(1)
        likely = F.softmax(x, -1, dtype=torch.float64) + F.log_softmax(x, -1, dtype=torch.float64)
        return F.cross_entropy(likely, target, ignore_index=1, label_smoothing=0.1)


def test_a_captured_program_is_captured_again() -> None:
    """It calls the operators themselves: they stay whole, and mean the same."""
    model, args = Picture().eval(), (torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2]))
    program = whence.capture(model, args)
    again = whence.capture(program.module(), args)
    assert [node.target for node in again.nodes()] == [node.target for node in program.nodes()]
    assert torch.equal(again.module()(*args), model(*args))


@pytest.mark.parametrize("function", [F.linear, lambda x, w, _: torch.matmul(x, w)], ids=["linear", "matmul"])
def test_of_open_sizes_its_parts_are_found_once(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a composite is made of gives on symbols what it gave in an equal call."""
    ran: list[Any] = []
    run = direct_recording.run_on_fakes

    def counted(*call: Any) -> Any:
        ran.append(call)
        return run(*call)

    monkeypatch.setattr(recorder, "run_on_fakes", counted)
    counts = []
    for calls in (1, 3):
        model = nn.Sequential(*(Using(function) for _ in range(calls)))
        program = whence.capture(model, (X,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},), reuse=False)
        assert torch.equal(program.module()(X[:, :2]), model(X[:, :2]))
        counts.append(len(ran))
        ran.clear()
    assert counts[0] == counts[1] > 0

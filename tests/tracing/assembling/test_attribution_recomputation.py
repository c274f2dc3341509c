"""Regions that are computed again in the backward."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import whence
from tests.checks import differing, verified
from tests.tracing.writing import BACKWARD, sines

MODES = pytest.mark.parametrize("mode", list(BACKWARD))
X = torch.randn(4, 8)


class Checkpointing(nn.Module):
    """Two blocks, used by a function that checkpoints them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], block: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.first = nn.Linear(8, 8)
        self.block = block or nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def again(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **options)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def one(m: Checkpointing, x: Tensor) -> Tensor:
    return again(m.block, m.first(x))


def twice(m: Checkpointing, x: Tensor) -> Tensor:
    return again(m.block, again(m.block, m.first(x)))


def inside_and_outside(m: Checkpointing, x: Tensor) -> Tensor:
    return again(m.block, m.block(x)) + m.block(x)


def nested(m: Checkpointing, x: Tensor) -> Tensor:
    return again(lambda hidden: m.first(again(m.block, hidden)), x)


def sequence(m: Checkpointing, x: Tensor) -> Tensor:
    return checkpoint_sequential(m.block, 2, m.first(x), use_reentrant=False)


def two_results(m: Checkpointing, x: Tensor) -> Tensor:
    left, right = again(lambda hidden: (m.block(hidden), m.first(hidden)), x)
    return left * right


def unused_result(m: Checkpointing, x: Tensor) -> Tensor:
    return again(lambda hidden: (m.block(hidden), m.first(hidden)), x)[0]


def selective(m: Checkpointing, x: Tensor) -> Tensor:
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return again(m.block, m.first(x), context_fn=kept)


BODIES = [one, twice, inside_and_outside, nested, sequence, two_results, unused_result, selective]


@pytest.mark.sample(5)
@MODES
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_checkpoint(body: Callable[[Any, Tensor], Tensor], mode: str) -> None:
    """A model with checkpoints has eager's outputs and gradients."""
    verified(Checkpointing(body), X, backward=BACKWARD[mode])


@pytest.mark.sample(4)
@MODES
@pytest.mark.parametrize("body", [one, twice, inside_and_outside, nested], ids=lambda body: body.__name__)
def test_checkpoint_around_random_numbers(body: Callable[[Any, Tensor], Tensor], mode: str) -> None:
    """The recomputation uses the random numbers of the forward, and the generator ends where eager's does."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    verified(Checkpointing(body, block).train(), X, backward=BACKWARD[mode])


@pytest.mark.parametrize("recording", [True, False], ids=["recording", "not recording"])
@pytest.mark.parametrize("body", [one, twice], ids=lambda body: body.__name__)
def test_forward_of_a_checkpoint_that_counts(
    body: Callable[[Any, Tensor], Tensor], *, recording: bool
) -> None:
    """A batch norm in a checkpoint counts a batch once in the forward, and once more in a backward, which a
    forward program does not have: it runs as eager does, and says so to who differentiates it."""
    model = Checkpointing(body, counting()).train()
    with torch.set_grad_enabled(recording):
        program = whence.capture(model, (X,))
    with torch.no_grad():
        result = program.verify(model, (X,))
    assert result.ok, str(result)
    with pytest.raises(whence.NotDifferentiable, match="a checkpoint that writes again in the backward"):
        program.module()(X).sum().backward()


@pytest.mark.parametrize("mode", ["tangents", "loss"])
@pytest.mark.parametrize("body", [one, twice], ids=lambda body: body.__name__)
def test_joint_of_a_checkpoint_that_counts(body: Callable[[Any, Tensor], Tensor], mode: str) -> None:
    """The forward of a joint program counts a batch once, and its backward once more, as eager does."""
    model = Checkpointing(body, counting()).train()
    program = verified(model, X, backward=BACKWARD[mode])
    tree = program.unflatten(copy=True)
    for _ in range(2):
        for module in (model, tree):
            module(X)
        assert differing(buffers(model), buffers(tree)) == []
        results = [module(X) for module in (model, tree)]
        sines(results[0]).backward()
        (results[1][0] if mode == "loss" else sines(results[1])).backward()
        assert differing(buffers(model), buffers(tree)) == []


def test_what_counts_again_is_differentiated_after_its_forward() -> None:
    """Eager goes on from what a buffer holds when the backward runs; where that is not what the forward left,
    or where the gradient of a result is not asked for, the captured backward says so."""
    model = Checkpointing(one, counting()).train()
    tree = whence.capture(model, (X,), backward=True).unflatten(copy=True)
    first, second = tree(X), tree(X)
    second.sum().backward()
    with pytest.raises(whence.NotDifferentiable, match="has changed since the forward"):
        first.sum().backward()
    both: Any = lambda m, x: (one(m, x), m.first(x))  # noqa: E731
    beside = Checkpointing(both, counting()).train()
    tree = whence.capture(beside, (X,), backward=True).unflatten(copy=True)
    with pytest.raises(whence.NotDifferentiable, match="that of a result was not"):
        tree(X)[1].sum().backward()
    with pytest.raises(whence.NotDifferentiable, match="a checkpoint, which may be around it"):
        tree.get_submodule("block")(X.clone().requires_grad_()).sum().backward()


def test_preserved_calls_count_once() -> None:
    """Where another module may come, nothing is written in the backward: the error names the step."""
    model = Checkpointing(one, counting()).train()
    with pytest.raises(whence.UnsupportedMutation, match="capture_step") as caught:
        whence.capture(model, (X,), backward=True, preserve_calls=["block.*"])
    assert "block_1_running_mean" in str(caught.value)


@pytest.mark.parametrize("body", [one, twice], ids=lambda body: body.__name__)
def test_step_with_a_checkpoint_that_counts(body: Callable[[Any, Tensor], Tensor]) -> None:
    """A step counts as often as eager does."""
    models = [Checkpointing(body, counting()).train()]
    models.append(deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(x: Tensor, which: int = 0) -> None:
        optimizers[which].zero_grad()
        models[which](x).sin().sum().backward()
        optimizers[which].step()

    program = whence.capture_step(step, (X,), model=models[0], optimizer=optimizers[0])
    bound = program.bind(models[0], optimizers[0])
    for _ in range(2):
        bound(X)
        step(X, 1)
    assert differing(*(model.state_dict() for model in models)) == []


@pytest.mark.parametrize("mode", ["tangents", "loss"])
def test_checkpoint_that_draws_new_numbers(mode: str) -> None:
    """Where the user lets the recomputation draw other numbers, the program draws them too, or refuses."""

    def body(m: Checkpointing, x: Tensor) -> Tensor:
        return again(m.block, m.first(x), preserve_rng_state=False)

    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
    model = Checkpointing(body, block).train()
    try:
        program = whence.capture(model, (X,), backward=BACKWARD[mode])
    except whence.CaptureError:
        return
    result = program.verify(model, (X,))
    assert result.ok, str(result)


def test_every_draw_that_a_recomputation_does_not_repeat_is_named() -> None:
    """A region that draws otherwise the second time is refused, with all the draws that differ."""

    def region(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 1:
            return x.sin() * torch.rand_like(x) * torch.randn_like(x)
        return x.sin() * torch.randn_like(x) * torch.rand_like(x)

    runs: list[int] = []
    model = Checkpointing(lambda m, x: again(region, m.first(x)))
    with pytest.raises(whence.UnmatchedRecomputation) as caught:
        whence.capture(model, (X,), backward=True)
    assert "aten.randn_like.default, aten.rand_like.default" in caught.value.what
    assert caught.value.where.line is not None and caught.value.where.line.endswith("<locals>.region")


def test_reentrant_checkpoint_in_the_forward() -> None:
    """The older kind of checkpoint is captured in the forward."""
    verified(Checkpointing(lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=True)), X)


def test_reentrant_checkpoint_in_the_backward_is_refused() -> None:
    """The older kind of checkpoint cannot be differentiated by a capture, which says what to use instead."""
    model = Checkpointing(lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=True))
    for backward in (True, lambda outputs: outputs.sum()):
        with pytest.raises(whence.SideEffect, match="use_reentrant=False") as caught:
            whence.capture(model, (X,), backward=backward)
        assert "test_attribution_recomputation.py" in str(caught.value.where.line)


def test_hooks_of_a_checkpoint_are_not_the_models() -> None:
    """What autograd saves inside of a checkpoint is packed by PyTorch: no origin names a hook."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            run = lambda y: self.linear(y).sin().relu()  # noqa: E731
            result: Tensor = checkpoint(run, x.sin(), use_reentrant=False)
            return result.cos()

    program = whence.capture(Model(), (torch.randn(2, 4),), backward=torch.sum)
    nodes = [node for node in program.nodes() if node.op == "call_function"]
    assert {program.where(node).hook for node in nodes} == {None}

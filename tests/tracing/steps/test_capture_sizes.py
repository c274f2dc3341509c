"""A step may be captured for every size of a batch."""

import pytest
import torch
from torch.export import Dim
from torch.optim import AdamW, Optimizer

import whence
from tests.checks import differing, state
from tests.models import case
from tests.tracing.steps.small import batch, clipped, small, two_losses
from tests.tracing.steps.twins import training
from whence.errors import CallError


@pytest.mark.parametrize("make", [clipped, two_losses])
def test_every_batch_is_eager(make: object) -> None:
    """At sizes other than that of the example, bit for bit, with one program."""
    models, optimizers = zip(*(small() for _ in range(2)), strict=True)
    ours, theirs = (make(*pair) for pair in zip(models, optimizers, strict=True))  # type: ignore[operator]
    program = whence.capture_step(
        ours, (batch(9),), model=models[0], optimizer=optimizers[0], dynamic_shapes={"x": {0: Dim.DYNAMIC}}
    )
    run = program.bind(models[0], optimizers[0])
    for size in (9, 12, 15):
        run(batch(size))
        theirs(batch(size))
        assert differing(state(models[1]), state(models[0])) == [], size
        assert program.verify(models[0], (batch(size),)).ok
    with pytest.raises(CallError):
        run(batch(9)[:, :3])


@pytest.mark.slow
def test_llama_at_every_size() -> None:
    """A language model, with batch and length that vary."""
    row = case("llama")
    twins = []
    for _ in range(2):
        model, *_ = row.make()
        optimizer: Optimizer = AdamW(model.parameters(), lr=0.01)
        forward = lambda ids, model=model: model(input_ids=ids, labels=ids, use_cache=False)  # noqa: E731
        twins.append((model, optimizer, training(forward, optimizer, row.loss)))  # type: ignore[arg-type]
    (model, optimizer, step), (other, _, eager) = twins
    ids = torch.randint(3, 100, (2, 8))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = whence.capture_step(
        step, (ids,), model=model, optimizer=optimizer, dynamic_shapes={"args": dynamic}
    )
    run = program.bind(model, optimizer)
    for shape in ((2, 8), (3, 5), (4, 11)):
        ids = torch.randint(3, 100, shape)
        assert torch.equal(run(ids), eager(ids))
        assert differing(state(other), state(model)) == [], shape

"""Every model of the table, trained by a captured step: eager's bits after every step."""

import pytest

from tests.models import MODEL_CASES, ModelCase, case
from tests.tracing.steps.twins import OPTIMIZERS, trained_alike

REPRESENTATIVE = {
    "llama": "adamw",
    "gpt2_dropout": "adam",
    "llama_checkpoint": "sgd",
    "llama_grouped": "adamw",
    "bert": "momentum",
    "tied_language_model": "adamw",
    "resnet": "sgd",
    "lstm": "nesterov",
    "checkpoint_dropout": "adamw",
    "energy_forces": "sgd",
    "momentum_teacher": "adam",
    "cached_attention": "amsgrad",
    "custom_function": "rmsprop",
    "autocast": "adamw",
    "spectral_norm": "sgd_decay",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "optimizer"), REPRESENTATIVE.items(), ids=REPRESENTATIVE)
def test_step_is_eager(name: str, optimizer: str) -> None:
    """Three steps leave eager's loss, parameters, buffers, gradients, optimizer and random numbers."""
    trained_alike(case(name), optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("row", MODEL_CASES, ids=lambda row: row.name)
def test_every_step_is_eager(row: ModelCase, optimizer: str) -> None:
    """The same for every row and the common optimizers."""
    trained_alike(row, optimizer)


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_is_eager(optimizer: str) -> None:
    """The same for every optimizer, also for those that write lists of tensors at once."""
    trained_alike(case("running_statistics"), optimizer, steps=4)

"""Verifications in several threads."""

import sys
from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import nn

import whence

X = torch.ones(8, 16)


@pytest.fixture
def _often_switched() -> Iterator[None]:
    """Threads take turns a thousand times as often as they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often_switched")
def test_models_that_draw_are_verified_beside_each_other() -> None:
    """Generators are the process's: no verification draws what another has seeded."""
    found: list[bool] = []

    def verify() -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16))
        program = whence.capture(model, (X,))
        found.extend(program.verify(model, (X,)).ok for _ in range(8))

    threads = [Thread(target=verify) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 24

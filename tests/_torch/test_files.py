"""Whose code a file holds, and where PyTorch looks up what it has no file for."""

from typing import Any

import pytest
import torch
from torch import nn

from whence._torch.files import COMPUTING, FUNCTIONS_OF_C


@pytest.mark.canary("torch._VF")
def test_recurrent_networks_look_up_functions_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, each time: another one that is there runs in the place of PyTorch's."""
    lstm, model, x = FUNCTIONS_OF_C.lstm, nn.LSTM(2, 2), torch.ones(3, 1, 2)
    before, _ = model(x)

    def twice(*given: Any) -> Any:
        out, *rest = lstm(*given)
        return out * 2, *rest

    monkeypatch.setattr(FUNCTIONS_OF_C, "lstm", twice, raising=False)
    assert torch.equal(model(x)[0], before * 2)


def test_what_computes_in_python_is_there() -> None:
    """Layers, distributions and optimizers."""
    for held in (nn.Linear.forward, torch.distributions.Normal.log_prob, torch.optim.SGD.__init__):
        assert held.__code__.co_filename.startswith(COMPUTING)

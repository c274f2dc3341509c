"""What code asks about modes is told, and answered as eager answers it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import overrides

from whence._torch.autograd.mode_questions import GRAD, INFERENCE, answered_questions, mode_now
from whence._torch.higher_order.function_graphs import functions_unwatched


@pytest.mark.parametrize(
    ("question", "mode"), [("is_grad_enabled", GRAD), ("is_inference_mode_enabled", INFERENCE)]
)
@pytest.mark.parametrize("inside", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_question_is_told_and_answered(question: str, mode: str, inside: Callable[[], object]) -> None:
    """With the mode as it is; nobody is told any more behind the block."""
    told: list[str] = []
    with inside(), answered_questions(told.append, lambda: True, nullcontext) as pairs:  # type: ignore[attr-defined]
        assert getattr(torch, question)() is mode_now(mode)
        (held,) = [function for function, _ in pairs if function.__name__ == question]
    assert told == [mode]
    assert getattr(torch, question) is held


def test_other_threads_ask_unheard() -> None:
    """A model that runs in another thread is not ours."""
    told: list[str] = []
    with answered_questions(told.append, lambda: True, nullcontext):
        thread = threading.Thread(target=torch.is_grad_enabled)
        thread.start()
        thread.join()
    assert told == []


class Looking(overrides.TorchFunctionMode):
    """A mode of somebody else."""


def test_somebody_else_who_looks_at_functions_is_seen() -> None:
    """Only the recording is left out of the answer."""
    tensor = torch.ones(1)
    with Looking(), answered_questions(lambda _: None, lambda: True, functions_unwatched):
        assert overrides.has_torch_function((tensor,))
    with answered_questions(lambda _: None, lambda: True, functions_unwatched):
        assert not overrides.has_torch_function((tensor,))

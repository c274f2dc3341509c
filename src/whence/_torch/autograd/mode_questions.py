"""What code asks about the mode it runs in, on one thread: functions of torch's that no function mode sees.

Whether somebody looks at torch functions is a question, too: PyTorch's modules take a slower way where the
answer is yes, and a recording looks. It is answered as eager answers it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dis import get_instructions
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import overrides

from whence._torch.autograd.switches import READ
from whence._torch.patching import patched

GRAD, INFERENCE = "grad mode", "inference mode"
_QUESTIONS = MappingProxyType({GRAD: "is_grad_enabled", INFERENCE: "is_inference_mode_enabled"})
_LOOKERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

Pair = tuple[Any, Any]
"""A function of torch's, and what is put in its place."""


def mode_now(name: str) -> bool:
    """How a mode is that code may ask for."""
    return bool(READ[name][0]())


@contextmanager
def answered_questions(
    asked: Callable[[str], None], counts: Callable[[], bool], unwatched: Callable[[], Any]
) -> Iterator[Sequence[Pair]]:
    """Tell of every mode that this thread asks for inside the block.

    Where it `counts` who asks, those who look at torch functions are left out of the answer to whether
    somebody does, by `unwatched`. Gives what was replaced, for names that files have for it.
    """
    here = threading.get_ident()

    def question(mode: str, function: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            if threading.get_ident() == here:
                asked(mode)
            return function()

        return answer

    def looker(function: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            if threading.get_ident() != here or not counts():
                return function(*args)
            with unwatched():
                return function(*args)

        return answer

    held: list[tuple[Any, str, Callable[..., Any]]] = [  # not in torch._C, where Dynamo looks for its own
        *((torch, name, question(mode, getattr(torch, name))) for mode, name in _QUESTIONS.items()),
        *((overrides, name, looker(getattr(overrides, name))) for name in _LOOKERS),
    ]
    pairs = [(getattr(owner, name), answer) for owner, name, answer in held]
    with ExitStack() as patches:
        for owner, name, answer in held:
            patches.enter_context(patched(owner, name, answer))
        yield pairs


def is_given_back(frame: FrameType) -> bool:
    """Whether code that calls for the grad mode does nothing with the answer but set that mode again."""
    if "set_grad_enabled" not in frame.f_code.co_names:
        return False
    rows = [row for row in get_instructions(frame.f_code) if row.opname not in ("PRECALL", "NOP")]
    at = max(at for at, row in enumerate(rows) if row.offset <= frame.f_lasti)  # a call has room behind it
    if not rows[at].opname.startswith("CALL"):
        return False
    then = rows[at + 1]
    if not then.opname.startswith("CALL") or then.arg != 1 or then.positions is None:
        return False
    start = then.positions[0], then.positions[2]  # a call begins where what it calls is named
    named = (row.positions for row in rows[:at] if row.argval == "set_grad_enabled")
    return None not in start and any(place and (place[0], place[2]) == start for place in named)

"""An error of the model stays the model's own, with a note of what was going on."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from whence._torch.record.fake_failures import is_of_fake_tensors, let_go_of_guards
from whence.errors import CaptureError, Place
from whence.tracing.answers import Answers
from whence.tracing.refusals import fake_failed

_SHOWN = 3


class CaptureNoting(AbstractContextManager[None]):
    """Adds notes to any exception that passes through, and swallows none.

    One of PyTorch's machinery is no error of the model's: it becomes the cause of one of ours.

    `answers` name the lines where the model was told that it is being compiled: it may have taken a branch
    there that it does not take in eager mode.
    """

    def __init__(self, name: str, failed_at: Callable[[BaseException], Place], answers: Answers) -> None:
        self._name = name
        self._failed_at = failed_at
        self._answers = answers

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        let_go_of_guards(error)
        if error is None or isinstance(error, CaptureError):
            return
        if is_of_fake_tensors(error):
            raise fake_failed(error, self._failed_at(error)) from error
        error.add_note(
            f"whence was capturing {self._name} ({self._failed_at(error)}); "
            "the model's own tensors and state are as before"
        )
        if isinstance(error, RecursionError):
            limit = 10 * sys.getrecursionlimit()
            error.add_note(
                "modules may be nested too deep for Python's limit, which eager meets, too: "
                f"sys.setrecursionlimit({limit}) before the capture and the calls"
            )
        asked = [str(source) for source in self._answers.compiled][-_SHOWN:]
        if asked:
            error.add_note(
                "it asked whether it is being compiled, and was told so; in eager mode it may go another way "
                f"there: {', '.join(asked)}"
            )

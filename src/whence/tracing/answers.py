"""What code is told that asks whether it is being compiled: eager's answer, wherever that can be captured.

Library code asks `torch.compiler.is_compiling()` before it looks at values, and often computes something else
where the answer is yes. So a capture says no at first, as eager does. Where what then happens cannot be
captured, the line that asked last is told yes in another attempt, it alone, and the program says so.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from whence.dependence.asking import Failed, attempt, dismiss
from whence.errors import ToldCompiled, UnsupportedInput, WhenceError
from whence.provenance import Source
from whence.tracing.source_lines import SourceFinder

Result = TypeVar("Result")
_SHOWN = 3


@dataclass(frozen=True)
class Answers:
    """The lines that are told that they are compiled, and which asked in an attempt, the last at the end."""

    told: frozenset[Source] = frozenset()
    asked: dict[Source, None] = field(default_factory=dict)

    def to(self, source: Source) -> bool:
        """What is told to a line, which is noted."""
        self.asked.pop(source, None)
        self.asked[source] = None
        return source in self.told

    def to_whoever_asks(self, finder: SourceFinder) -> bool | None:
        """What is told to code that asks now; None for code that does not count.

        PyTorch's own modules are told what eager tells them: they ask in order to compute otherwise.
        """
        if finder.is_module_asking():
            return False
        source = finder.asked()
        return None if source is None else self.to(source)

    @property
    def untold(self) -> tuple[Source, ...]:
        """The lines that were told no, the last first."""
        return tuple(source for source in reversed(self.asked) if source not in self.told)

    @property
    def compiled(self) -> tuple[Source, ...]:
        """The lines that were told yes."""
        return tuple(source for source in self.asked if source in self.told)


def with_eager_answers(told: Sequence[Source], capture: Callable[[Answers], Result]) -> Result:
    """What `capture` gives with as many of eager's answers as can be; `told` are lines that get another.

    Raises what the last attempt raises, in which every line is told that it is compiled; a class that pytree
    does not know stays unknown, whatever is told.
    """
    answers = Answers(frozenset(told))
    found = attempt(lambda: capture(answers))
    first = found.error if isinstance(found, Failed) else None
    while isinstance(found, Failed) and answers.untold and not isinstance(found.error, UnsupportedInput):
        answers, found = _told_more(answers, found, capture)
    if isinstance(found, Failed):
        try:
            raise _with_first_error(found.error, first)
        finally:
            del found, first  # or the error would hold this frame, which holds it
    dismiss(first)
    return found


def _with_first_error(error: Exception, first: Exception | None) -> Exception:
    """An error of code that was told that it is compiled, with what came of eager's answers."""
    if error is not first and not isinstance(error, WhenceError):
        error.add_note(
            f"with eager's answers the capture ended otherwise: {str(first).partition(chr(10))[0]}"
        )
    return error


def _told_more(
    answers: Answers, failed: Failed, capture: Callable[[Answers], Result]
) -> tuple[Answers, Result | Failed]:
    """An attempt in which one line more is told yes; where none of them alone makes a difference, all are."""
    for source in answers.untold:
        other = Answers(answers.told | {source})
        found = attempt(lambda other=other: capture(other))  # type: ignore[misc]
        if not isinstance(found, Failed) or not _are_alike(found.error, failed.error):
            return other, found
        dismiss(found.error)
    other = Answers(answers.told.union(answers.untold))
    return other, attempt(lambda: capture(other))


def _are_alike(left: Exception, right: Exception) -> bool:
    return type(left) is type(right) and str(left) == str(right)


def warn_if_told(lines: Sequence[Source]) -> None:
    """Say to who called our caller that a program goes another way at these lines than eager may go."""
    if not lines:
        return
    shown = ", ".join(map(str, lines[:_SHOWN]))
    warnings.warn(
        f"the program goes the way of compiled code at {shown}: the model asks there whether it is being "
        "compiled, and eager goes by values, which a capture does not have. What it computes may differ from "
        'eager: program.verify says whether it does on inputs, and decide="example" goes eager\'s way',
        ToldCompiled,
        stacklevel=3,
    )


def told_to(lines: Sequence[Source]) -> Callable[[], bool | None]:
    """What to tell whoever asks now, so that these lines are told that they are compiled, and no others."""
    return partial(Answers(frozenset(lines)).to_whoever_asks, SourceFinder(()))

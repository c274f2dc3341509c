"""Where a run is, and where an error came from: a module call and a line of the user's."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from torch import fx

from whence._torch.record.fake_failures import is_of_fake_tensors, let_go_of_guards
from whence._torch.refusals import fake_failed, is_about_number, number_wanted
from whence.errors import CaptureError, DataDependent, Place
from whence.provenance import ModulePath, Source
from whence.provenance.places import PROGRAM
from whence.tracing.answers import Answers
from whence.tracing.listening.data_dependence import refused_size
from whence.tracing.listening.running import Running
from whence.tracing.source_lines import SourceFinder

_SHOWN = 3


@dataclass(frozen=True)
class Places:
    """Names places of the run that goes on.

    `needed` makes the error for the last value that was needed: C++ may have put one of its own in its place
    (`torch.Size([2, tensor])`).
    """

    running: Running
    finder: SourceFinder
    answers: Answers
    needed: list[Callable[[], DataDependent]] = field(default_factory=list)

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """An error of the model stays the model's own; a note says that a capture was running, and where."""
        with CaptureNoting(name, self.failed, self.answers, self.needed):
            try:
                yield
            except RuntimeError as error:
                try:
                    if (refused := refused_size(error, self.failed(error))) is None:
                        raise
                    raise refused from error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
                finally:
                    del refused  # or it would hold this frame, which holds it, as the error beneath would

    def here(self) -> Place:
        """The module that is running and the user's line."""
        return self._place(self.running.scope, self.finder.current())

    def reading(self) -> tuple[ModulePath | None, Source | None]:
        """The module that is running now, and the user's line."""
        scope = self.running.scope
        path = None if scope == PROGRAM else self.running.log.scopes[scope].site.path
        return path, self.line()

    def line(self) -> Source | None:
        """The user's line that runs."""
        return self.finder.current()

    def failed(self, error: BaseException) -> Place:
        """The module whose call raised `error` and the innermost line of user code it passed through."""
        failed = self.running.failed
        return self._place(self.running.scope if failed is None else failed, self.finder.raised_at(error))

    def made(self, node: fx.Node) -> Place:
        """Where a value was computed."""
        mark = self.running.log.marks.get(node)
        return Place() if mark is None else self._place(mark.scope, mark.source)

    def _place(self, scope: int, source: Source | None) -> Place:
        """A call and a line; no call for code outside any module."""
        module = None if scope == PROGRAM else str(self.running.log.scopes[scope].site)
        return Place(module, str(source) if source else None)


class CaptureNoting(AbstractContextManager[None]):
    """Adds notes to any exception that passes through, and swallows none.

    One of PyTorch's machinery is no error of the model's: it becomes the cause of one of ours.

    `answers` name the lines where the model was told that it is being compiled: it may have taken a branch
    there that it does not take in eager mode. `needed` makes the error that another may have taken the place
    of.
    """

    def __init__(
        self,
        name: str,
        failed_at: Callable[[BaseException], Place],
        answers: Answers,
        needed: Sequence[Callable[[], DataDependent]] = (),
    ) -> None:
        self._name = name
        self._failed_at = failed_at
        self._answers = answers
        self._needed = needed

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        let_go_of_guards(error)
        if error is None or isinstance(error, CaptureError):
            return
        if is_of_fake_tensors(error):
            raise fake_failed(error, self._failed_at(error)) from error
        if is_about_number(error):
            raise number_wanted(error, self._failed_at(error)) from error
        for make in self._needed if isinstance(error, TypeError) else ():
            needed = make()
            if needed.where.line == self._failed_at(error).line:
                raise needed from error
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

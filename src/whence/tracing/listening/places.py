"""Where a run is, and where an error came from: a module call and a line of the user's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from whence.errors import Place
from whence.provenance import ModulePath, Source
from whence.provenance.places import PROGRAM
from whence.tracing.answers import Answers
from whence.tracing.listening.running import Running
from whence.tracing.recording.data_dependence import refused_size
from whence.tracing.recording.error_notes import CaptureNoting
from whence.tracing.source_lines import SourceFinder


@dataclass(frozen=True)
class Places:
    """Names places of the run that goes on."""

    running: Running
    finder: SourceFinder
    answers: Answers

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """An error of the model stays the model's own; a note says that a capture was running, and where."""
        with CaptureNoting(name, self.failed, self.answers):
            try:
                yield
            except RuntimeError as error:
                if (refused := refused_size(error, self.failed(error))) is None:
                    raise
                raise refused from error

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

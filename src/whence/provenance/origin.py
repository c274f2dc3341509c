"""Where one node came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whence.provenance.path import ModulePath
from whence.schema import Phase, Quality

GENERATED_FILE = "<whence>"
"""The file name of code that whence writes for captured bodies."""
GENERATED_LINES = "whence_lines"
"""The global name under which such code carries the user's line behind each of its own."""
GENERATED_NODES = "whence_nodes"
"""The global name under which it carries the name of the operation that each of its lines runs."""
_LATEST = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Source:
    """A line of Python: the user's own code where there is any on the stack."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The name of the file and the line: `model.py:12`."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class CallSite:
    """One call of one module: its path, which call of that path it is (0 for the first), and its class."""

    path: ModulePath
    index: int = 0
    type: str = ""

    @property
    def name(self) -> str:
        """The last segment of the path, with `@1`, `@2` for later calls."""
        return f"{self.path.name}@{self.index}" if self.index else self.path.name

    def __str__(self) -> str:
        """`layer` for the first call of a module, `layer@1` for the second."""
        return f"{self.path}@{self.index}" if self.index else str(self.path)


class Origin(NamedTuple):
    """Where one node came from; a program has one for nearly every node, and a tuple is made quickly.

    `calls` names the innermost module call with its full path; it is empty for operations outside any
    module (a loss function, a free function) and has several entries only for accumulated gradients.
    `place` is the call whose graph holds the node: the common ancestor of several contributors, and None
    where that is the program itself. `forward` names the forward node that a backward node differentiates.
    `recomputed` marks operations that a checkpoint runs a second time during the backward pass. `hook` is the
    qualified name of the hook, on a module or a tensor, that ran the operation. `passes` are the passes
    (`program.track`) that made the operation from others, the latest last.
    """

    phase: Phase
    calls: tuple[CallSite, ...] = ()
    quality: Quality = Quality.EXACT
    source: Source | None = None
    forward: str | None = None
    place: CallSite | None = None
    recomputed: bool = False
    hook: str | None = None
    passes: tuple[str, ...] = ()

    @property
    def made_in(self) -> CallSite | None:
        """The call that made it, which the graph that holds it need not be.

        An operation in a branch of a `cond` is held where the `cond` is, and one of an optimizer is about the
        module whose parameter it updates. A sum of several calls is made in the call around them.
        """
        is_of_one = len(self.calls) == 1 and self.quality is not Quality.ACCUMULATED
        return self.calls[0] if is_of_one else self.place

    def __str__(self) -> str:
        module = " + ".join(str(call) or "(root)" for call in self.calls) or "outside any module"
        parts = [self.phase.value, module, self.quality.value]
        parts += ["recomputed"] if self.recomputed else []
        parts += [f"hook {self.hook}"] if self.hook else []
        parts += [f"by {', '.join(self.passes)}"] if self.passes else []
        parts += [f"of {self.forward}"] if self.forward else []
        parts += [str(self.source)] if self.source else []
        return " · ".join(parts)


InnermostCall = Callable[[Sequence[CallSite | None]], CallSite | None]
"""The innermost call around several; None is the program."""


def merged(origins: Sequence[Origin], around: InnermostCall, name: str) -> Origin:
    """The origin of an operation that the pass `name` put in the place of those with `origins`.

    It names every call that contributed, and its place is the innermost call around all their places. Its
    phase is the latest of theirs, its line that of the last. Nobody saw it run, so it is `inferred` at best.
    """
    last = origins[-1]
    unknown = any(origin.quality is Quality.NONE for origin in origins)
    return Origin(
        phase=max((origin.phase for origin in origins), key=_LATEST.index),
        calls=tuple(dict.fromkeys(call for origin in origins for call in origin.calls)),
        quality=Quality.NONE if unknown else Quality.INFERRED,
        source=last.source,
        forward=last.forward,
        place=around([origin.place for origin in origins]),
        recomputed=all(origin.recomputed for origin in origins),
        hook=last.hook if len({origin.hook for origin in origins}) == 1 else None,
        passes=(*dict.fromkeys(step for origin in origins for step in origin.passes if step != name), name),
    )

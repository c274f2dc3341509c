"""What had been recorded when a capture stopped, attached to the error that stopped it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import fx

from whence.errors import CaptureError
from whence.program.node_records import has_origin, set_origin
from whence.program.queries.printing import partial_page
from whence.provenance import Origin
from whence.provenance.places import PROGRAM
from whence.rewriting.functionalize import Functional
from whence.schema import Phase, Quality
from whence.tracing.attribution.gradient_edges import GradientSums
from whence.tracing.log.events import Marked
from whence.tracing.log.log import Log
from whence.tracing.objections import Doubt
from whence.tracing.recording.session import Session
from whence.tracing.replay.records.expand import expand
from whence.tracing.replay.records.markers import Markers


@dataclass(frozen=True, eq=False)
class Partial:
    """The graph of a capture that stopped, and why; printed, it ends where the capture did.

    Nodes of the forward have their origin. Which module a node of the backward belongs to is worked out when
    the backward is complete, so those have none yet.
    """

    name: str
    graph: fx.Graph
    stopped: str

    def __str__(self) -> str:
        return partial_page(self.name, self.graph, self.stopped)


@contextmanager
def keeping_what_was_recorded(session: Session) -> Iterator[None]:
    """Attach what `session` has recorded to every `CaptureError` that passes through, and where it came from.

    An error that does not know its place by itself came from something the model called, such as a capture.
    """
    try:
        yield
    except CaptureError as error:
        if not str(error.where) and (passed := session.run.places.failed(error)).line is not None:
            error.where = passed
        if error.partial is None:
            error.partial = _partial(session, error)
        raise


def _partial(session: Session, error: CaptureError) -> Partial:
    graph = session.recorder.graph
    _drop_failed(graph, session.replay.records.markers)
    for node in graph.nodes:
        if not has_origin(node) and (mark := session.log.marks.get(node)) is not None:
            set_origin(node, _origin(mark, session.log))
    with suppress(Doubt):  # then stand-ins are shown as what they are
        expand(session.replay.records, session.log, Functional(graph), GradientSums())
    stopped = "\n   ".join(filter(None, (error.what, str(error.where))))
    return Partial(session.log.scopes[PROGRAM].site.type, graph, stopped)


def _drop_failed(graph: fx.Graph, markers: Markers) -> None:
    """An operation that failed has a node, and no value; a marker has none, either."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or "val" in node.meta or node.users or node in markers.nodes:
            return
        graph.erase_node(node)


def _origin(mark: Marked, log: Log) -> Origin:
    """What is known of a node before the gradients have been worked out."""
    calls = () if mark.scope == PROGRAM else (log.scopes[mark.scope].site,)
    known = mark.phase is Phase.FORWARD or mark.recomputed
    quality = Quality.EXACT if known else Quality.NONE
    return Origin(mark.phase, calls, quality, mark.source, recomputed=mark.recomputed)

"""The estimated timeline and memory as events that Perfetto and Chrome show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.reports.formats.nodes import Drawn, EnclosingCalls, Row, by_graph, cost_with_inside, drawn, short

_NANO = 1e9
_PROCESS, _TRACK = 1, 1


@dataclass(frozen=True)
class _Span:
    """What is around operations: a call, or an operation that runs graphs."""

    label: str
    category: str
    told: Mapping[str, Any] = field(default_factory=dict)


Spans = tuple[_Span, ...]


def trace(figures: Row) -> dict[str, Any]:
    """Operations one behind another, each as long as the device takes at least, in the calls around them.

    An operation that runs graphs is around theirs, of which each is as long as all of its runs; a branch that
    does not count is left out. Times are microseconds in whole nanoseconds, which is all that Perfetto keeps:
    rounded by itself one may overlap another. Memory is a counter in bytes, as it is while an operation runs.
    """
    program, device = figures["program"], figures["device"]
    names = {"process_name": program["name"], "thread_name": f"estimated on {device}"}
    heads = [_event("M", name, 0.0, args={"name": text}) for name, text in names.items()]
    return {"traceEvents": [*heads, *_events(figures)], "displayTimeUnit": "ns"}


def _event(phase: str, name: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": name,
        "ts": _nanoseconds(seconds) / 1000,
        "pid": _PROCESS,
        "tid": _TRACK,
        **more,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANO)


def _events(figures: Row) -> Iterator[dict[str, Any]]:
    alive, now = dict(figures["memory"]["timeline"]), 0.0
    open_spans: Spans = ()
    for around, node in _Order(figures).steps("", ()):
        shared = _spans_shared(open_spans, around)
        yield from _closed(open_spans[shared:], now)
        for span in around[shared:]:
            yield _event(
                "B", span.label, now, cat=span.category, **({"args": span.told} if span.told else {})
            )
        open_spans, seconds = around, 0.0
        if not around or around[-1].told.get("node") != node.name:  # which runs no graphs
            seconds, span = cost_with_inside(node, figures)[3], _span_of_operation(node, figures)
            length = (_nanoseconds(now + seconds) - _nanoseconds(now)) / 1000
            yield _event("X", span.label, now, dur=length, cat=span.category, args=span.told)
        if node.name in alive:
            yield _event("C", "memory", now, args={"alive": alive[node.name]})
        now += seconds
    yield from _closed(open_spans, now)


def _span_of_operation(node: Drawn, figures: Row) -> _Span:
    flops, read, written, _ = cost_with_inside(node, figures)
    told = {"node": node.name, "line": node.row["origin"]["source"]}
    return _Span(
        short(node.row["target"]),
        node.row["origin"]["phase"],
        {**told, "flops": flops, "read": read, "written": written},
    )


class _Order:
    """The operations in the order in which they run, those of a graph inside of what runs it."""

    def __init__(self, figures: Row) -> None:
        self._figures, self._idle = figures, set(figures["idle"])
        self._sites = EnclosingCalls(figures["program"]["calls"])
        self._graphs = by_graph(list(drawn(figures["program"]["nodes"])))
        self._holders = set(self._graphs)

    def steps(self, graph: str, around: Spans) -> Iterator[tuple[Spans, Drawn]]:
        """Each with what is around it; one that runs graphs comes before them, and is around itself.

        A graph that several run is in the first of them, with the time of all.
        """
        for node in self._graphs.pop(graph, ()):
            if node.row["op"] != "call_function" or node.name in self._idle:
                continue
            calls = [
                _Span(EnclosingCalls.label(call), f"call,{node.row['origin']['phase']}")
                for call in self._sites.chain(node)
            ]
            spans = (*around, *(span for span in calls if span not in around))
            held = [name for name in dict.fromkeys(node.reads()) if name in self._holders]
            if held:
                spans = (*spans, _span_of_operation(node, self._figures))
            yield spans, node
            for name in held:
                yield from self.steps(name, spans)


def _spans_shared(open_spans: Sequence[_Span], around: Sequence[_Span]) -> int:
    """How many of the open spans are still around."""
    pairs = zip(open_spans, around, strict=False)
    return next(
        (at for at, (before, now) in enumerate(pairs) if before != now), min(len(open_spans), len(around))
    )


def _closed(spans: Sequence[_Span], now: float) -> Iterator[dict[str, Any]]:
    for span in reversed(spans):
        yield _event("E", span.label, now, cat=span.category)

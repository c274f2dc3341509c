"""The estimated timeline and memory as events that Perfetto and Chrome show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator
from typing import Any

from whence.reports.formats.nodes import CallsAround, Row, cost_with_inside, short

_NANO = 1e9
_PROCESS, _TRACK = 1, 1


def trace(figures: Row) -> dict[str, Any]:
    """Operations one behind another, each as long as the device takes at least, in the calls around them.

    Times are microseconds in whole nanoseconds, which is all that Perfetto keeps: rounded by itself one may
    overlap another. Memory is a counter in bytes, as it is while an operation runs.
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
    program, alive = figures["program"], dict(figures["memory"]["timeline"])
    sites, now = CallsAround(program["calls"]), 0.0
    open_calls: list[tuple[Row, str]] = []
    for node in program["nodes"]:
        if node["op"] != "call_function":
            continue
        phase, origin = node["origin"]["phase"], node["origin"]
        around = [(call, phase) for call in sites.chain(node)]
        yield from _closed(open_calls, _shared(open_calls, around), now)
        for call, of in around[len(open_calls) :]:
            open_calls.append((call, of))
            yield _event("B", CallsAround.label(call), now, cat=f"call,{of}")
        flops, read, written, seconds = cost_with_inside(node, figures)
        told = {
            "node": node["name"],
            "line": origin["source"],
            "flops": flops,
            "read": read,
            "written": written,
        }
        length = (_nanoseconds(now + seconds) - _nanoseconds(now)) / 1000
        yield _event("X", short(node["target"]), now, dur=length, cat=phase, args=told)
        if node["name"] in alive:
            yield _event("C", "memory", now, args={"alive": alive[node["name"]]})
        now += seconds
    yield from _closed(open_calls, 0, now)


def _shared(open_calls: list[tuple[Row, str]], around: list[tuple[Row, str]]) -> int:
    """How many of the open calls are still around."""
    pairs = zip(open_calls, around, strict=False)
    return next(
        (at for at, (before, now) in enumerate(pairs) if before != now), min(len(open_calls), len(around))
    )


def _closed(open_calls: list[tuple[Row, str]], left: int, now: float) -> Iterator[dict[str, Any]]:
    while len(open_calls) > left:
        call, phase = open_calls.pop()
        yield _event("E", CallsAround.label(call), now, cat=f"call,{phase}")

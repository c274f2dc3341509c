"""The timeline holds every operation once, in the calls around it, and is as long as the cost says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan

import whence
from tests.models import case
from tests.viewer.reading import program_of


def test_what_a_scan_repeats_takes_its_time() -> None:
    """Its operations lie in it, each with all of its runs; a branch that does not count is left out."""

    def products(first: torch.Tensor, rows: torch.Tensor) -> Any:
        found = scan(lambda carry, row: (carry @ row, row.sin()), first, rows)[1]
        return torch.cond(first.sum() > 0, lambda x: x @ x, lambda x: x.sin(), (found,))

    program = whence.capture(products, (torch.randn(3, 3), torch.randn(5, 3, 3)))
    events = json.loads(program.to_text("trace", "a100"))["traceEvents"]
    total = program.cost("a100").total
    operations = [event for event in events if event["ph"] == "X"]
    assert sum(event["dur"] for event in operations) == pytest.approx((total.seconds or 0) * 1e6, abs=1e-3)
    flops = {event["args"]["node"]: event["args"]["flops"] for event in operations}
    assert flops["scan_combine_graph_0/matmul"] == flops["true_graph_0/matmul"] == 5 * 54
    assert sum(flops.values()) == total.total_flops
    assert not any(name.startswith("false_graph_0") for name in flops)
    around = [event for event in events if event["ph"] == "B" and "args" in event]
    runs = {event["name"]: event["args"]["flops"] for event in around}
    assert runs == {"scan": 5 * 54, "cond": 5 * 54}
    assert list(rules_broken({"traceEvents": events})) == []


def test_operations_lie_in_their_calls() -> None:
    """One behind another; calls begin and end like brackets."""
    program = program_of()
    events = json.loads(program.to_text("trace", "a100"))["traceEvents"]
    operations = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["node"] for event in operations] == [
        node.name for node in program.graph.nodes if node.op == "call_function"
    ]
    around: list[str] = []
    for event in events:
        if event["ph"] == "B":
            around.append(event["name"])
        elif event["ph"] == "E":
            assert around.pop() == event["name"]
        elif event["ph"] == "X":
            places = program.where(event["args"]["node"]).place
            assert (around[-1].partition(":")[0] if around else "") == (
                "" if places is None else str(places) or "(root)"
            )
    assert around == []
    seconds = program.cost("a100").total.seconds
    assert sum(event["dur"] for event in operations) == pytest.approx((seconds or 0) * 1e6, abs=1e-3)
    assert operations[-1]["ts"] + operations[-1]["dur"] == pytest.approx((seconds or 0) * 1e6, abs=1e-3)


def test_memory_is_a_counter() -> None:
    """As the timeline of `memory()`."""
    program = program_of()
    events = json.loads(program.to_text("trace"))["traceEvents"]
    alive = dict(program.memory().timeline)
    counted = [event["args"]["alive"] for event in events if event["ph"] == "C"]
    assert counted == [alive[node.name] for node in program.graph.nodes if node.op == "call_function"]


NAMES_OF_METADATA = {"process_name", "thread_name", "process_labels"}
PHASES = set("BEXiIC bensftPNODMVvR(c") - {" "}


def rules_broken(trace: dict[str, Any]) -> Iterator[str]:
    """What of a trace is otherwise than the description of the Trace Event Format says."""
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield "displayTimeUnit is neither ms nor ns"
    for number, event in enumerate(trace["traceEvents"]):
        yield from (f"{number}: {why}" for why in event_faults(event))
    yield from track_faults([event for event in trace["traceEvents"] if event["ph"] in "BEX"])


def event_faults(event: dict[str, Any]) -> Iterator[str]:
    if not isinstance(event.get("ph"), str) or event["ph"] not in PHASES:
        yield "ph is no phase"
    if any(type(event.get(key)) is not int for key in ("pid", "tid")):
        yield "pid and tid are numbers"
    if not isinstance(event.get("ts"), int | float) or not event["ts"] >= 0:
        yield "ts is a time"
    if event["ph"] != "E" and not isinstance(event.get("name"), str):
        yield "name is a text"
    if event["ph"] == "X" and not (isinstance(event.get("dur"), int | float) and event["dur"] >= 0):
        yield "a complete event has a duration"
    counted = event.get("args", {"": ""}).values() if event["ph"] == "C" else ()
    if not all(type(each) in (int, float) for each in counted):
        yield "a counter has numbers"
    if event["ph"] == "M" and not (event["name"] in NAMES_OF_METADATA and event.get("args")):
        yield "metadata have a known name, and say something"
    if not isinstance(event.get("cat", ""), str) or not isinstance(event.get("args", {}), dict):
        yield "cat is a text, and args an object"


def track_faults(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Within a track: times in order, calls like brackets, and complete events inside of them."""
    tracks: dict[tuple[int, int], list[str]] = {}
    times: dict[tuple[int, int], Decimal] = {}
    for event in events:
        track = event["pid"], event["tid"]
        around = tracks.setdefault(track, [])
        begun, length = (Decimal(str(event.get(key, 0))) * 1000 for key in ("ts", "dur"))
        if begun % 1 or length % 1:
            yield f"{event['name']} is no whole number of nanoseconds"
        if begun < times.get(track, 0):
            yield f"{event['name']} begins before what is before it has ended"
        times[track] = begun + length
        if event["ph"] == "B":
            around.append(event["name"])
        if event["ph"] == "E" and (not around or around.pop() != event["name"]):
            yield f"{event['name']} ends, and has not begun"
    yield from (f"{name} does not end" for around in tracks.values() for name in around)


MODELS = ("llama", "t5", "checkpoint", "transformer_encoder_dropout", "lstm")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_it_keeps_the_rules_of_the_format(name: str) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    found = case(name)
    model, args, kwargs = found.make()
    program = whence.capture(model, args, kwargs, backward=found.loss)
    assert list(rules_broken(json.loads(program.to_text("trace")))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ph": "Z"},
        {"pid": "1"},
        {"ts": -1.0},
        {"name": 3},
        {"dur": -1.0},
        {"ph": "C", "args": {"alive": "much"}},
        {"ph": "M", "args": {"name": "x"}},
        {"ph": "B"},
        {"ph": "E"},
        {"ts": 1e9},
        {"dur": 0.0001},
        {"cat": 3},
    ],
    ids=str,
)
def test_each_rule_is_looked_at(change: dict[str, Any]) -> None:
    """An event that breaks one is found."""
    trace = json.loads(program_of().to_text("trace"))
    at = next(n for n, event in enumerate(trace["traceEvents"]) if event["ph"] == "X")
    trace["traceEvents"][at] |= change
    assert list(rules_broken(trace))


def test_the_unit_is_looked_at() -> None:
    """Milliseconds and nanoseconds are shown, and nothing else."""
    trace = json.loads(program_of().to_text("trace"))
    assert list(rules_broken({**trace, "displayTimeUnit": "s"}))

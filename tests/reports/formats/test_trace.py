"""The timeline holds every operation once, in the calls around it, and is as long as the cost says."""

from __future__ import annotations

import json

import pytest

from tests.viewer.reading import program_of


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
    assert sum(event["dur"] for event in operations) == pytest.approx((seconds or 0) * 1e6)
    assert operations[-1]["ts"] + operations[-1]["dur"] == pytest.approx((seconds or 0) * 1e6)


def test_memory_is_a_counter() -> None:
    """As the timeline of `memory()`."""
    program = program_of()
    events = json.loads(program.to_text("trace"))["traceEvents"]
    alive = dict(program.memory().timeline)
    counted = [event["args"]["alive"] for event in events if event["ph"] == "C"]
    assert counted == [alive[node.name] for node in program.graph.nodes if node.op == "call_function"]

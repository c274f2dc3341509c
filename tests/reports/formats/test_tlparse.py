"""The log for `tlparse` has its records and digests; `tests/libraries` have `tlparse` read it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tests.viewer.reading import program_of

RECORD = re.compile(r"V\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ (\S+:\d+)\] (\{.*\})")


def records(text: str) -> list[tuple[dict[str, Any], str]]:
    """Each record, with its payload."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            match = RECORD.fullmatch(line)
            assert match is not None
            found.append((json.loads(match[2]), []))
    return [(head, "\n".join(payload)) for head, payload in found]


def test_records_have_their_payloads() -> None:
    """Each with the digest that the reader compares, and a place among compilations."""
    program = program_of()
    found = records(program.to_text("tlparse"))
    for head, payload in found:
        assert head["has_payload"] == hashlib.md5(payload.encode()).hexdigest()
        assert head["frame_id"] == 0
    named = {head["artifact"]["name"]: payload for head, payload in found if "artifact" in head}
    assert json.loads(named["whence_program"]) == json.loads(program.to_json())
    dumps = {head["graph_dump"]["name"]: payload for head, payload in found if "graph_dump" in head}
    assert all(node.name in dumps["whence_operations"] for node in program.select("**"))
    assert all(row.name in dumps["whence_signature"] for row in program.signature.inputs)
    assert len(dumps["whence_guards"].splitlines()) >= len(program.guards)
    trace = json.loads(program.to_text("trace"))["traceEvents"]
    assert [json.loads(payload) for head, payload in found if "chromium_event" in head] == trace

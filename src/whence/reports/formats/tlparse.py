"""A program as artefacts in the structured log of PyTorch's compiler, which `tlparse` makes a site of.

Each record is a line of JSON behind a prefix as glog writes it, with the digest of its payload, which
follows, indented by tabs. https://github.com/pytorch/tlparse
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from whence.reports.formats.nodes import EnclosingCalls, Row, drawn
from whence.reports.formats.trace import trace

_PREFIX = "V0101 00:00:00.000000 0 whence/reports/formats/tlparse.py:1]"
"""A time and a process are none of a program's, and the same program gives the same text."""


def tlparse(figures: Row) -> str:
    """The log: signature, operations by call, what calls cost, guards, and all of it as data."""
    program = figures["program"]
    compile_id = {"frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    records = [
        ({"graph_dump": {"name": "whence_signature"}}, "\n".join(_signature(program))),
        ({"graph_dump": {"name": "whence_operations"}}, "\n".join(_operations(figures))),
        ({"graph_dump": {"name": "whence_guards"}}, "\n".join(_guards(program))),
        (_artefact("whence_calls"), json.dumps(figures["rows"])),
        (_artefact("whence_memory"), json.dumps(figures["memory"])),
        (_artefact("whence_program"), json.dumps(program)),
    ]
    records += [({"chromium_event": {}}, json.dumps(event)) for event in trace(figures)["traceEvents"]]
    return "".join(_log_record({**what, **compile_id}, payload) for what, payload in records)


def _artefact(name: str) -> dict[str, Any]:
    return {"artifact": {"name": name, "encoding": "json"}}


def _log_record(what: dict[str, Any], payload: str) -> str:
    digest = hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
    indented = payload.replace("\n", "\n\t")
    return f"{_PREFIX} {json.dumps({**what, 'has_payload': digest})}\n\t{indented}\n"


def _signature(program: Row) -> Iterator[str]:
    for row in program["inputs"]:
        yield f"in   {row['kind']:<15} {row['name']}  {row['path']}"
    for row in program["outputs"]:
        yield f"out  {row['kind']:<15} {row['name']} <- {row.get('node')}  {row['path']}"


def _operations(figures: Row) -> Iterator[str]:
    """A line each, below the call that makes it, with the line of the model behind it."""
    program, heading = figures["program"], ""
    sites = EnclosingCalls(program["calls"])
    for node in drawn(program["nodes"]):
        if node.row["op"] in ("placeholder", "output"):
            continue
        origin, chain = node.row["origin"], sites.chain(node)
        now = f"{origin['phase']}  {EnclosingCalls.site(chain[-1]) or '(root)' if chain else ''}"
        if now != heading:
            heading = now
            yield f"\n{now}"
        made = figures["made"][node.name]
        yield f"  {node.name}: {made} = {node.row['target']}  # {origin['source']}"


def _guards(program: Row) -> Iterator[str]:
    for guard in program["guards"]["guards"]:
        yield f"{guard['kind']:<10} {guard['what']}: {guard['expected']}  ({guard['reason']})"

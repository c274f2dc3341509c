"""The figures of a program as columns of numbers over one table of texts: what the page reads.

Numbers that refer to nodes are distances backwards, and those that grow are differences: equal layers are
then equal numbers, which compression stores once.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from whence.reports.formats.nodes import Drawn, EnclosingCalls, Row, drawn
from whence.schema import Phase, Quality

FORM = 3
"""The version of this form; the page refuses another one."""

REFERENCE = "\x00"
"""Stands in the text of an expression for a node."""


class Texts:
    """Each text once, by number, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    def listed(self) -> list[str]:
        """All of them."""
        return list(self._numbers)


def columns(figures: Row) -> dict[str, Any]:
    """What `reports.figures` says of a program, for the page."""
    texts, program = Texts(), figures["program"]
    nodes = list(drawn(program["nodes"]))
    return {
        "form": FORM,
        "name": program["name"],
        "torch": program["torch"],
        "device": figures["device"],
        "notes": figures["notes"],
        "history": figures["program"]["history"],
        "calls": _call_columns(figures["rows"], program["calls"], texts),
        "nodes": _node_columns(nodes, program["calls"], texts),
        "costs": _costs(nodes, figures["costs"]),
        "made": [texts.number(figures["made"].get(node.name, "")) for node in nodes],
        "bases": _distances(nodes, figures["bases"]),
        "values": _finite_values(nodes, figures["values"]),
        "memory": _memory_drawn(nodes, figures["memory"], texts),
        "chosen": _chosen_columns(figures["chosen"], texts),
        "inputs": [
            _input_row(row, figures["chosen"]["held"], texts)
            for row in (*program["inputs"], *program["attributes"])
        ],
        "outputs": [_output(row, texts) for row in program["outputs"]],
        "texts": texts.listed(),
    }


def _call_columns(rows: Sequence[Row], calls: Sequence[Row], texts: Texts) -> dict[str, Any]:
    named = ("path", "index", "type", "depth")
    return {
        "path": [texts.number(row["path"]) for row in calls],
        "index": [row["index"] for row in calls],
        "type": [texts.number(row["type"]) for row in calls],
        "parent": [row["parent"] for row in calls],
        "figures": {key: [row[key] for row in rows] for key in rows[0] if key not in named},
    }


def _node_columns(nodes: Sequence[Drawn], calls: Sequence[Row], texts: Texts) -> dict[str, Any]:
    sites = {EnclosingCalls.site(row): row["number"] for row in reversed(calls[1:])}
    phases, qualities = list(Phase), list(Quality)
    rows = [node.row for node in nodes]
    spelled = [_expression(row) for row in rows]
    references = [
        [at - node.known[name] for name in read if name in node.known]
        for at, (node, (_, read)) in enumerate(zip(nodes, spelled, strict=True))
    ]
    origins = [row["origin"] for row in rows]
    places = [_place_number(origin["place"], sites) for origin in origins]
    return {
        "name": [row["name"] for row in rows],
        "op": [texts.number(row["op"]) for row in rows],
        "target": [texts.number(row["target"]) for row in rows],
        "expression": [texts.number(text) for text, _ in spelled],
        "reads": [distance for row in references for distance in row],
        "count": [len(row) for row in references],
        "within": [0 if node.owner < 0 else at - node.owner for at, node in enumerate(nodes)],
        "place": _differences(places),
        "phase": [phases.index(Phase(origin["phase"])) for origin in origins],
        "quality": [qualities.index(Quality(origin["quality"])) for origin in origins],
        "source": [texts.number(origin["source"] or "") for origin in origins],
        "forward": [
            at - node.known[origin["forward"]] if origin["forward"] in node.known else 0
            for at, (node, origin) in enumerate(zip(nodes, origins, strict=True))
        ],
        "recomputed": [at for at, origin in enumerate(origins) if origin["recomputed"]],
        "calls": {
            str(at): [sites.get(call, 0) for call in origin["calls"]]
            for at, (origin, place) in enumerate(zip(origins, places, strict=True))
            if [sites.get(call, 0) for call in origin["calls"]] != ([place] if place else [])
        },
        "passes": {
            str(at): [texts.number(name) for name in origin["passes"]]
            for at, origin in enumerate(origins)
            if origin["passes"]
        },
    }


def _place_number(place: str | None, sites: Mapping[str, int]) -> int:
    return 0 if place is None else sites.get(place, 0)


def _expression(node: Row) -> tuple[str, list[str]]:
    """How a node computes its value, and the nodes that it reads, in order."""
    read: list[str] = []
    arguments = [_text_of_value(each, read) for each in node["args"]]
    arguments += [f"{key}={_text_of_value(each, read)}" for key, each in node["kwargs"]["mapping"].items()]
    return ", ".join(arguments), read


def _text_of_value(value: Any, read: list[str]) -> str:
    match value:
        case {"node": name}:
            read.append(name)
            return REFERENCE
        case {"mapping": held}:
            return "{" + ", ".join(f"{key}: {_text_of_value(each, read)}" for key, each in held.items()) + "}"
        case {"tensor": tensor}:
            return f"{tensor['dtype']}{_text_of_value(tensor['shape'], read)}"
        case {"slice": parts}:
            return ":".join("" if part is None else _text_of_value(part, read) for part in parts)
        case Mapping():
            return ", ".join(_text_of_value(each, read) for each in value.values())
        case list():
            return "[" + ", ".join(_text_of_value(each, read) for each in value) + "]"
    return (value if isinstance(value, str) else repr(value)).replace(REFERENCE, "")


def _costs(nodes: Sequence[Drawn], costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    found = [costs.get(node.name, (0, 0, 0, 0)) for node in nodes]
    return {
        name: [row[at] for row in found] for at, name in enumerate(("flops", "read", "written", "seconds"))
    }


def _distances(nodes: Sequence[Drawn], others: Mapping[str, str]) -> list[int]:
    return [
        at - node.known[others[node.name]] if others.get(node.name) in node.known else 0
        for at, node in enumerate(nodes)
    ]


def _finite_values(nodes: Sequence[Drawn], values: Mapping[str, float] | None) -> list[float | None] | None:
    return None if values is None else [_finite(values.get(node.name)) for node in nodes]


def _finite(value: float | None) -> float | None:
    """JSON has no word for the others, and no colour stands for them."""
    return value if value is not None and abs(value) < float("inf") else None


def _memory_drawn(nodes: Sequence[Drawn], memory: Row, texts: Texts) -> dict[str, Any]:
    places = {node.name: at for at, node in enumerate(nodes) if node.owner < 0}
    kept = sorted(memory["kept"], key=lambda row: places[row["node"]])
    return {
        "peak": memory["peak"],
        "at": places[memory["at"]],
        "where": memory["where"],
        "parts": memory["parts"],
        "nodes": _differences([places[name] for name, _ in memory["timeline"]]),
        "alive": _differences([alive for _, alive in memory["timeline"]]),
        "kept": {
            "node": _differences([places[row["node"]] for row in kept]),
            "consumer": _differences([places[row["consumer"]] for row in kept]),
            "bytes": [row["bytes"] for row in kept],
            "reads": [texts.number(row["reads"]) for row in kept],
        },
    }


def _differences(numbers: Sequence[int]) -> list[int]:
    return [now - before for before, now in pairwise([0, *numbers])]


def _chosen_columns(chosen: Row, texts: Texts) -> dict[str, Any]:
    """What `select` asks of nodes: their positions as differences."""
    return {
        "marks": {mark: _differences(places) for mark, places in chosen["marks"].items()},
        "kinds": chosen["kinds"],
        "said": {
            key: [[texts.number(text), _differences(places)] for text, places in said.items()]
            for key, said in chosen["said"].items()
        },
    }


def _input_row(row: Row, held: Row, texts: Texts) -> list[Any]:
    kind, module = texts.number(row["kind"]), held[row["name"]]
    return [row["name"], kind, row["path"], row["aliases"], row["of"], module["type"], module["is_held"]]


def _output(row: Row, texts: Texts) -> list[Any]:
    return [row["name"], texts.number(row["kind"]), row["path"], row.get("node")]

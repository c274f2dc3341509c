"""The nodes of plain data as other formats want them: of every graph, with what each reads and its calls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whence.reports.figures import INSIDE

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A node, what `figures` calls it, the positions of those that it may read by name, and that of the node
    that holds its graph: -1 for the program's own."""

    row: Row
    name: str
    known: Mapping[str, int]
    owner: int

    @property
    def holder(self) -> str:
        """The name of the node that holds its graph."""
        return self.name.removesuffix(self.row["name"]).removesuffix(INSIDE)

    def reads(self) -> list[str]:
        """The nodes that it reads, in order, one twice where it stands twice."""
        around = self.name.removesuffix(self.row["name"])
        return [f"{around}{name}" for name in _names_inside([self.row["args"], self.row["kwargs"]])]


def drawn(
    nodes: Sequence[Row],
    outer: Mapping[str, int] | None = None,
    owner: int = -1,
    at: int = 0,
    around: str = "",
) -> Iterator[Drawn]:
    """The nodes of all graphs in order, those of a nested graph behind the node that holds it."""
    names = dict(outer or {})
    for node in nodes:
        names[node["name"]] = at
        name = f"{around}{node['name']}"
        yield Drawn(node, name, names, owner)
        inside = list(drawn(node["graph"], names, at, at + 1, f"{name}{INSIDE}")) if "graph" in node else []
        yield from inside
        at += 1 + len(inside)


def by_graph(nodes: Sequence[Drawn]) -> dict[str, list[Drawn]]:
    """The nodes of each graph by the node that holds it, the program's own first."""
    found: dict[str, list[Drawn]] = {}
    for node in nodes:
        found.setdefault(node.holder, []).append(node)
    return found


def _names_inside(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if set(value) == {"node"}:
            yield value["node"]
        else:
            yield from (name for held in value.values() for name in _names_inside(held))
    elif isinstance(value, list):
        yield from (name for held in value for name in _names_inside(held))


def forward_of(node: Drawn, nodes: Sequence[Drawn]) -> str:
    """The name of its forward node; empty without one."""
    at = node.known.get(node.row["origin"]["forward"])
    return "" if at is None else nodes[at].name


def cost_with_inside(node: Drawn, figures: Row) -> list[float]:
    """FLOPs, bytes read and written, and seconds of a node, with the graphs that it runs."""
    found: list[float] = figures["inside"].get(node.name) or figures["costs"].get(node.name, [0, 0, 0, 0.0])
    return found


def short(target: str) -> str:
    """An operator without what most of them share: `mm` for `aten.mm.default`."""
    return target.removeprefix("aten.").removesuffix(".default")


class EnclosingCalls:
    """The calls of a program by their sites, as nodes name them."""

    def __init__(self, calls: Sequence[Row]) -> None:
        self._calls = calls
        self._numbers = {self.site(row): row["number"] for row in reversed(calls[1:])}

    @staticmethod
    def site(call: Row) -> str:
        """`layer` for the first call of a module, `layer@1` for the second."""
        return f"{call['path']}@{call['index']}" if call["index"] else str(call["path"])

    @staticmethod
    def label(call: Row) -> str:
        """The call site and the class of the module."""
        return f"{EnclosingCalls.site(call) or '(root)'}: {call['type']}"

    def chain(self, node: Drawn) -> list[Row]:
        """The calls around a node, outermost first, without the program itself."""
        place = node.row["origin"]["place"]
        number = 0 if place is None else self._numbers.get(place, 0)
        found: list[Row] = []
        while number:
            found.insert(0, self._calls[number])
            number = self._calls[number]["parent"]
        return found

"""The nodes of plain data as other formats want them: what each reads, and the calls around it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def reads(node: Row) -> list[str]:
    """The nodes that a node reads, in order, one twice where it stands twice."""
    return list(_names([node["args"], node["kwargs"]]))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if set(value) == {"node"}:
            yield value["node"]
        else:
            yield from (name for held in value.values() for name in _names(held))
    elif isinstance(value, list):
        yield from (name for held in value for name in _names(held))


def cost_with_inside(node: Row, figures: Row) -> list[float]:
    """FLOPs, bytes read and written, and seconds of a node, with the graphs that it runs."""
    found: list[float] = figures["inside"].get(node["name"]) or figures["costs"].get(
        node["name"], [0, 0, 0, 0.0]
    )
    return found


def short(target: str) -> str:
    """An operator without what most of them share: `mm` for `aten.mm.default`."""
    return target.removeprefix("aten.").removesuffix(".default")


class CallsAround:
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
        return f"{CallsAround.site(call) or '(root)'}: {call['type']}"

    def chain(self, node: Row) -> list[Row]:
        """The calls around a node, outermost first, without the program itself."""
        place = node["origin"]["place"]
        number = 0 if place is None else self._numbers.get(place, 0)
        found: list[Row] = []
        while number:
            found.insert(0, self._calls[number])
            number = self._calls[number]["parent"]
        return found

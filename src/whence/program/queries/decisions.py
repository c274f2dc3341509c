"""What a run depends on besides its inputs and what it draws: answers that values of the example gave."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.sizes.numbers import stays
from whence.program.node_records import origin_of
from whence.program.queries.marks import is_drawn, leading_to
from whence.provenance import CallSite, Source


@dataclass(frozen=True)
class DecisionByValue:
    """Something that Python read of tensors, and the answer that every run must have.

    `node` is the name of the check in the graph, `call` and `source` say who asked and where, `asked` what
    was read, over the names of nodes. What is `drawn` follows from random numbers, too.
    """

    node: str
    call: CallSite | None
    source: Source | None
    asked: str
    answer: Any
    drawn: bool = False

    def __str__(self) -> str:
        drawn = ", drawn at random" if self.drawn else ""
        called = "" if self.call is None else f"in {str(self.call) or '(root)'}, "
        return f"{self.asked} is {self.answer!r}{drawn}: {called}at {self.source}"


def decisions_in(nodes: Iterable[fx.Node]) -> tuple[DecisionByValue, ...]:
    """The decisions of a graph, in order."""
    return tuple(_decision_at(node) for node in nodes if is_decision(node))


def is_decision(node: fx.Node) -> bool:
    """Whether a node holds a run to an answer of the capture."""
    return node.op == "call_function" and node.target is stays


def _decision_at(node: fx.Node) -> DecisionByValue:
    origin = origin_of(node)
    answer, asked = node.args[1:3]
    call = origin.calls[0] if origin.calls else None
    drawn = any(map(is_drawn, leading_to([node])))
    return DecisionByValue(node.name, call, origin.source, str(asked), answer, drawn)

"""What a run depends on besides its inputs: answers that values of the example gave, and random numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.operators.schemas import op_name
from whence._torch.sizes.numbers import stays
from whence.program.node_records import origin_of
from whence.program.queries.marks import is_drawn, leading_to
from whence.program.signature import describe
from whence.provenance import CallSite, Source
from whence.schema import Phase


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
    return tuple(_decision(node) for node in nodes if is_decision(node))


def is_decision(node: fx.Node) -> bool:
    """Whether a node holds a run to an answer of the capture."""
    return node.op == "call_function" and node.target is stays


def _decision(node: fx.Node) -> DecisionByValue:
    origin = origin_of(node)
    answer, asked = node.args[1:3]
    call = origin.calls[0] if origin.calls else None
    drawn = any(map(is_drawn, leading_to([node])))
    return DecisionByValue(node.name, call, origin.source, str(asked), answer, drawn)


@dataclass(frozen=True)
class Draw:
    """An operation that draws from the generator of its device, in the order of the graph.

    `node` is its name, `value` what it makes, `phase`, `call` and `source` say where it came from; `call` is
    None outside of any module.
    """

    node: str
    operation: str
    value: str
    phase: Phase
    call: CallSite | None
    source: Source | None

    def __str__(self) -> str:
        called = "" if self.call is None else f"  {str(self.call) or '(root)'}"
        return f"{self.node}: {self.value}  {self.operation}{called}"


def draws_in(nodes: Iterable[fx.Node]) -> tuple[Draw, ...]:
    """All of a graph's, those of branches and loops included."""
    return tuple(_draw(node) for node in nodes if is_drawn(node))


def _draw(node: fx.Node) -> Draw:
    origin = origin_of(node)
    call = origin.calls[0] if origin.calls else None
    value = describe(node.meta.get("val"))
    return Draw(node.name, op_name(node.target), value, origin.phase, call, origin.source)

"""Random numbers that a program draws: what it takes in besides its inputs."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.program.node_records import origin_of
from whence.program.queries.marks import is_drawn
from whence.program.signature import describe
from whence.provenance import CallSite, Source
from whence.schema import Phase


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

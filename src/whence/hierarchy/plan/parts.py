"""What a plan moves as one: an operation, or a whole call that computes the same as an earlier one.

Such a call is not planned again. As its caller sees it, it needs the values that its nodes read from outside,
and gives those that others read from it.
"""

from dataclasses import dataclass, field

from torch import fx

from whence._torch.graphs import value_inputs
from whence.hierarchy.plan.facts import NodeLayout
from whence.hierarchy.plan.plan import Region
from whence.schema import Phase


@dataclass
class BodyPart:
    """A step of a body as its caller sees it: an operation by name, or an equal call by number.

    `region` is the call in whose body it is a step. `needs` are the values it reads from other parts.
    """

    step: str | int
    region: Region
    needs: dict[str, None] = field(default_factory=dict)


@dataclass
class Parts:
    """All parts in order, the part that makes each value, and the equal calls that keep values for their
    backward."""

    layout: NodeLayout
    rows: list[BodyPart] = field(default_factory=list)
    makers: dict[str, BodyPart] = field(default_factory=dict)
    keeping: set[int] = field(default_factory=set)
    _copied: dict[Region, BodyPart] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        """Make a node a part, or a piece of the part that its call is."""
        phase, call = self.layout.regions[node.name]
        copy = self.layout.copies[call]
        names = [source.name for source in value_inputs(node)]
        if copy is None:
            part = BodyPart(node.name, (phase, call), dict.fromkeys(names))
            self.rows.append(part)
        else:
            part = self._copied.get((phase, copy)) or self._copy(phase, copy)
            makers = self.makers
            for name in names:
                if makers.get(name) is not part and not self._is_own_state(name, call, copy):
                    part.needs[name] = None
        self.makers[node.name] = part

    def keep_inside(self) -> None:
        """What an equal call has in its forward, it keeps for its backward: nobody brings it from outside."""
        for (phase, copy), part in self._copied.items():
            forward = self._copied.get((Phase.FORWARD, copy))
            if phase is Phase.FORWARD or forward is None:
                continue
            kept = [name for name in part.needs if self._has(forward, name)]
            for name in kept:
                del part.needs[name]
            self.keeping |= {copy} if kept else set()

    def _copy(self, phase: Phase, copy: int) -> BodyPart:
        part = self._copied[phase, copy] = BodyPart(copy, (phase, self.layout.parents[phase][copy]))
        self.rows.append(part)
        return part

    def _is_own_state(self, name: str, call: int, copy: int) -> bool:
        """Whether a call between the one that reads a value and the copy around it holds it as state."""
        if name not in self.layout.state_paths:
            return False
        while self.layout.readable(name, call) is None:
            if call == copy:
                return False
            call = self.layout.parents[Phase.FORWARD][call]
        return True

    def _has(self, forward: BodyPart, name: str) -> bool:
        if name in self.layout.state_paths:
            return False
        return name in forward.needs or self.makers.get(name) is forward


def parts_of(layout: NodeLayout) -> Parts:
    parts = Parts(layout)
    for node in layout.nodes:
        parts.add(node)
    parts.keep_inside()
    return parts

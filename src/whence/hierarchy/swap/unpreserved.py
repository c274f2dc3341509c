"""Another module in the place of a call that was not preserved, where what crosses its borders is enough.

The plan of the tree hands such a call what its code reads. What another module would have to be handed and to
hand back is what a plan says that preserves the call: the newcomer runs where that is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from whence.errors import CallError
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.plan.planning import plan
from whence.hierarchy.run.captured import captured_of
from whence.hierarchy.run.wrapper_subclasses import registered_at
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.state import Replacing, touched_of
from whence.provenance import ModulePath


@dataclass(frozen=True)
class Unpreserved:
    """The place of a call whose calling convention was not kept: of all calls of its module, or `only` it."""

    place: CallPlace
    only: bool = False

    def forward(self, module: nn.Module, values: Sequence[Any]) -> tuple[Any, ...]:
        """Make the call on another module; raises `CallError` where that needs or gives anything else."""
        other = self._preserving
        if isinstance(other, str):
            raise replaced(self.place, module, other)
        missing = set(other.body.inputs).difference(self.place.body.inputs)
        if missing:
            raise replaced(self.place, module, f"the original reads nothing of its argument {min(missing)}")
        if not self.only:
            path = self.place.plan.site(self.place.number).path
            Replacing(other.plan, touched_of(other.plan), {path: module}, module).refuse(
                ROOT_CALL, trains=False
            )
        named = dict(zip(self.place.body.inputs, values, strict=True))
        results = other.forward(module, [named[name] for name in other.body.inputs])
        given = dict(zip(other.body.outputs, results, strict=True))
        return tuple(given[name] for name in self.place.body.outputs)

    @cached_property
    def _preserving(self) -> CallPlace | str:
        """The place in a plan that preserves the call, or why there is none."""
        program, number = self.place.plan.program, self.place.number
        path = self.place.plan.site(number).path
        calls = frozenset(row.number for row in program.calls if row.site.path == path)
        preserved = program.calls.preserved | ({number} if self.only else calls)
        made = program.with_changes(calls=replace(program.calls, preserved=preserved))
        if program.has_backward:
            return "its backward was captured with the original's"
        planned = plan(made)
        if number not in planned.calls:
            return "its operations are part of its caller's graph then"
        place = CallPlace(planned, number)
        if self.only and any(isinstance(target, ModulePath) for _, target in place.interface.writes):
            return "it writes state, which the other calls of the module read"
        return place


def in_place_of(place: CallPlace) -> CallPlace | Unpreserved:
    """What runs another module in the place of a call."""
    return place if place.number in place.plan.program.calls.preserved else Unpreserved(place)


def name_of_repeated(place: CallPlace) -> str:
    """The name under which a repeated call alone gets another module, `layer@1`; none for a first call."""
    site = place.plan.site(place.number)
    path = ModulePath((*site.path[:-1], site.name))
    is_modules = any(record.path == path for record in place.plan.program.modules)
    return site.name if site.index and not is_modules else ""


def refuse_lost(plan: Plan, number: int, module: nn.Module) -> None:
    """Raise `CallError` where a graph reads state of a module that was replaced by one without it."""
    around = plan.site(number).path
    for call in (number, *(each for each in plan.made if plan.site(each).path.is_within(around))):
        for _, path in plan.calls[call].forward.reads:
            within = plan.site(call).path.relative_to(around)
            holder = registered_at(module, ModulePath((*within, *path[:-1])))
            if holder is None or captured_of(holder) is not None or hasattr(holder, path[-1]):
                continue
            gone, new = ModulePath((*around, *within, *path[:-1])), type(holder).__name__
            raise CallError(
                f"{gone} was replaced by a {new}, and the graph around it reads {path[-1]} of it",
                remedy="replace the module in the original model and capture again",
            )


def replaced(place: CallPlace, module: Any, why: str) -> CallError:
    """The error that names a module which cannot run in the place of a captured one."""
    site = place.plan.site(place.number)
    return CallError(
        f"{site} was replaced by a {type(module).__name__}, which has no captured graph",
        why=why,
        remedy=f"capture with preserve_calls=[{str(site.path)!r}], and replace it then; or replace the "
        "module in the original model and capture again",
    )

"""What a tree does with state when other modules took the places of captured ones.

The graph around a newcomer was captured with the original's state. A value of it that others use, too, is the
newcomer's now where eager mode would say so; where the graph cannot tell, the call is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from whence.errors import CallError, Fault
from whence.hierarchy.plan.plan import Plan, first_within
from whence.hierarchy.run.captured import body_of, captured_of
from whence.hierarchy.run.wrapper_subclasses import registered_at
from whence.program import Input
from whence.provenance import ROOT, CallSite, ModulePath
from whence.schema import Phase

Replaced = Mapping[ModulePath, nn.Module]
"""The modules that took captured ones' places, by their paths in the whole model."""


@dataclass(frozen=True)
class Touched:
    """State that a preserved module holds, and the calls of the graph that use it.

    `readers` read it from the module at a path, `writers` gave it a value, and `sources` contributed to its
    gradient.
    """

    row: Input
    paths: tuple[ModulePath, ...]
    readers: tuple[tuple[int, ModulePath], ...]
    writers: frozenset[int]
    sources: frozenset[int]


def places(plan: Plan, number: int) -> Iterator[tuple[int, ModulePath]]:
    """The preserved calls in the module of a call, and their paths: those that its code makes as calls."""
    around = plan.site(number).path
    for call in sorted(plan.program.calls.preserved):
        path = plan.site(call).path
        if call in plan.made and path.is_within(around) and path != around:
            yield call, path


def places_written(
    plan: Plan, number: int, targets: Iterable[ModulePath]
) -> Iterator[tuple[int, ModulePath]]:
    """Calls, preserved or not, in the module of a call whose modules hold what is at the paths from there."""
    around = plan.site(number).path
    written = [ModulePath((*around, *target)) for target in targets]
    for call in sorted(plan.made):
        path = plan.site(call).path
        if path != around and path.is_within(around) and any(each.is_within(path) for each in written):
            yield call, path


def newcomers(
    plan: Plan, found: Sequence[tuple[int, ModulePath]], module: nn.Module, around: ModulePath
) -> Replaced:
    """The modules that took the places `found` in a module at the path `around`."""
    held = ((call, path, registered_at(module, path.relative_to(around))) for call, path in found)
    return {
        path: module
        for call, path, module in held
        if module is not None and body_of(module, plan, call) is None
    }


def refuse_half(plan: Plan, number: int, module: nn.Module) -> None:
    """Raise `CallError` where a newcomer took one name of a module that may have been called by another."""
    around, faults = plan.site(number).path, []
    for row in plan.renamed:
        names = [name for name in (row.site.path, *row.others) if name.is_within(around)]
        held = {name: registered_at(module, name.relative_to(around)) for name in names}
        new = {name: found for name, found in held.items() if found is not None and _is_new(found, plan)}
        if new and (len(new) < len(held) or len(set(map(id, new.values()))) > 1):
            faults.append(_half(row.site, list(held), list(new)))
    CallError.refuse(dict.fromkeys(faults))


def _is_new(module: nn.Module, plan: Plan) -> bool:
    holder = captured_of(module)
    return holder is None or all(call.plan is not plan for call in holder.bodies.values())


def _half(site: CallSite, names: Sequence[ModulePath], new: Sequence[ModulePath]) -> Fault:
    return Fault(
        f"{', '.join(map(str, names))} were one module, and another took {', '.join(map(str, new))} alone",
        why=f"nobody saw by which of the names the call {site} reached it: its caller did not read it",
        remedy="put one module under all of the names, or replace it in the original model and capture again",
    )


def is_shared(plan: Plan, name: str, module: ModulePath) -> bool:
    """Whether a parameter of one name in a preserved module gets gradients from each of its calls, and from
    around them."""
    paths = plan.program.input(name).attribute_paths
    scopes = {part.scope for part in plan.program.facts.contributions(name)}
    if not scopes or len(paths) != 1 or not paths[0].is_within(module):
        return False
    calls = (number for number in plan.program.calls.preserved if plan.site(number).path == module)
    each = not any(scopes.isdisjoint(plan.program.calls.within(number)) for number in calls)
    return each and not scopes <= plan.preserved[module]


def touched_of(plan: Plan) -> dict[str, Touched]:
    """The state that preserved modules hold, by the name of its input."""
    program = plan.program
    readers: dict[str, list[tuple[int, ModulePath]]] = {}
    for number, call in plan.calls.items():
        for body in filter(None, (call.forward, call.backward)):
            for name, path in body.reads:
                readers.setdefault(name, []).append((number, path.moved(ROOT, plan.site(number).path)))
    found = {}
    for row in program.signature.state:
        paths = row.attribute_paths
        if any(map(plan.is_of_preserved, paths)):
            found[row.name] = Touched(
                row,
                paths,
                tuple(readers.get(row.name, ())),
                frozenset(_home_of_value(plan, value) for value in program.facts.histories.get(row.name, ())),
                frozenset(part.scope for part in program.facts.contributions(row.name)),
            )
    return found


def _home_of_value(plan: Plan, value: str) -> int:
    return plan.regions.get(value, (Phase.FORWARD, 0))[1]


@dataclass(frozen=True)
class Replacing:
    """The modules that took others' places in the module `around`, and what becomes of the state of those."""

    plan: Plan
    touched: Mapping[str, Touched]
    modules: Replaced
    around: nn.Module

    def holder(self, name: str, around: ModulePath) -> ModulePath | None:
        """Where the module at `around` holds a parameter that the captured backward still has a gradient for.

        That is under a name that no newcomer took, and None where only calls of replaced modules used it.
        """
        touched = self.touched.get(name)
        if touched is not None and name in self.successors:
            return first_within(touched.paths, around)
        if touched is not None and touched.sources and touched.sources <= self._gone:
            return None
        names = self.plan.program.input(name).attribute_paths
        left = (path for path in names if not self.took(path))
        return first_within(left, around)

    @cached_property
    def successors(self) -> dict[str, Tensor]:
        """Parameters of newcomers that the graph around reads, too, by the names of those before them."""
        found = {}
        for name, touched in self.touched.items():
            gone, like = self._newcomer_around(touched.paths[0]), touched.row.value
            held = self._held(touched.paths[0])
            fits = isinstance(held, Tensor) and (held.shape, held.dtype) == (like.shape, like.dtype)
            if gone is not None and fits and is_shared(self.plan, name, gone):
                found[name] = held
        return found

    @property
    def trainable(self) -> tuple[Tensor, ...]:
        """The parameters of newcomers, once each."""
        found = {id(held): held for module in self.modules.values() for held in module.parameters()}
        return tuple(held for held in found.values() if held.requires_grad)

    def took(self, path: ModulePath) -> bool:
        """Whether a newcomer has taken an attribute path."""
        return self._newcomer_around(path) is not None

    def took_within(self, around: ModulePath) -> Callable[[tuple[str, ...]], bool] | None:
        """The same for paths from a module; None where there are no newcomers."""
        return (lambda path: self.took(ModulePath((*around, *path)))) if self.modules else None

    def _newcomer_around(self, path: ModulePath) -> ModulePath | None:
        return next((above for above in path.prefixes() if above in self.modules), None)

    def refuse(self, number: int, *, trains: bool) -> None:
        """Raise `CallError` where the graph cannot tell whether a newcomer's state is meant."""
        made = range(number, self.plan.program.calls.ends[self.plan.original(number)])
        faults = [
            Fault(
                f"{taken[0]} is of a module that was replaced, and {why}",
                why="the graph around the new module was captured with the original's",
                remedy="replace the module in the original model and capture again",
            )
            for touched in self.touched.values()
            if (taken := [path for path in touched.paths if self.took(path)])
            and (why := self._problem(touched, taken, made, trains))
        ]
        if torch.is_grad_enabled():
            faults += self._cast_together()
        if trains:
            rows = self.modules.items()
            faults += [_lazy(path, module) for path, module in rows if any(map(is_lazy, module.parameters()))]
        CallError.refuse(faults)

    def _cast_together(self) -> Iterator[Fault]:
        """Autocast casts a weight once for all who use it, and adds up their gradients in the other dtype."""
        rows = self.plan.program.calls.rows
        inside = [path for path in self.modules if any(rows[at].autocast for at in self.plan.preserved[path])]
        if not inside:
            return
        times = Counter(id(held) for _, held in self.around.named_parameters(remove_duplicate=False))
        for path in inside:
            if any(times[id(held)] > 1 and held.requires_grad for held in self.modules[path].parameters()):
                yield Fault(
                    f"the {type(self.modules[path]).__name__} in the place of {path} shares weights",
                    why="autocast casts them once for all who use them, and their gradients meet there",
                    remedy="replace the module in the original model and capture again",
                )

    def _problem(self, touched: Touched, taken: Sequence[ModulePath], made: range, trains: bool) -> str:
        if touched.writers:
            return self._written(touched, taken, made)
        for call, path in touched.readers:
            if call not in made or call in self._gone:
                continue
            names = [other for other in touched.paths if other.is_within(self.plan.site(call).path)]
            if len({id(self._held(other)) for other in names}) > 1:
                return f"{self._spelled(call)} reads {' or '.join(map(str, names))}, which were one"
            if path in taken and self._held(path) is None:
                return f"{self._spelled(call)} reads it, too, and the new module keeps none"
            if not trains or path not in taken:
                continue
            if touched.sources and touched.row.name not in self.successors:
                return f"{self._spelled(call)} reads it, too, so that its gradient is a sum"
            if not touched.sources and self._is_trained(path):
                return f"{self._spelled(call)} reads it, too, and it was frozen at capture"
        return ""

    def _written(self, touched: Touched, taken: Sequence[ModulePath], made: range) -> str:
        left = [path for path in touched.paths if path not in taken]
        outside = sorted(call for call in touched.writers if call in made and call not in self._gone)
        if left:
            return f"it is written, and was {left[0]}, too"
        if outside:
            return f"{self._spelled(outside[0])} writes it"
        if len({id(self._held(path)) for path in taken}) > 1:
            return f"it is written, and was {' and '.join(map(str, taken[1:]))}, too"
        return ""

    def _is_trained(self, path: ModulePath) -> bool:
        held = self._held(path)
        return isinstance(held, Tensor) and held.requires_grad

    def _held(self, path: ModulePath) -> Any:
        """What is at an attribute path of a newcomer; None where it is the original's."""
        gone = self._newcomer_around(path)
        if gone is None:
            return None
        return registered_at(self.modules[gone], path.relative_to(gone))

    def _spelled(self, call: int) -> str:
        return str(self.plan.site(call)) or "the model's forward"

    @cached_property
    def _gone(self) -> frozenset[int]:
        return frozenset(self._numbers())

    def _numbers(self) -> Iterator[int]:
        program, numbering = self.plan.program, self.plan.numbering
        for number in program.calls.preserved:
            if self.plan.site(number).path in self.modules:
                for call in program.calls.within(number):
                    yield call
                    yield numbering.repeat_of.get(call, call)


def _lazy(path: ModulePath, module: nn.Module) -> Fault:
    return Fault(
        f"the {type(module).__name__} in the place of {path} has parameters without a size",
        why="autograd is told of them before they are first used",
        remedy="call it once before you put it there",
    )

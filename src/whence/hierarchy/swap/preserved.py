"""Another module in the place of a preserved one: what the captured graph around it does then.

The graph hands a module flat values and takes flat values back. A preserved call is also handed the arguments
that nothing in it reads, so any module with the original's calling convention can be called in its place.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.autograd.nodes import above_autograd
from whence._torch.autograd.switches import switched
from whence._torch.pytrees import tree_flatten
from whence.errors import CallError, Noting
from whence.hierarchy.plan.plan import Body, Plan, first_within
from whence.hierarchy.run.interface import Interface, interface_of
from whence.hierarchy.run.wrapper_subclasses import registered_at
from whence.hierarchy.swap.newcomers import SwapTrial
from whence.hierarchy.swap.results import Returned
from whence.hierarchy.swap.state import is_shared
from whence.program import Absent
from whence.provenance import ModulePath
from whence.schema import Phase

Values = dict[str, Any]


@dataclass(frozen=True)
class CallPlace:
    """The place of one preserved call, which another module may take."""

    plan: Plan
    number: int

    @cached_property
    def interface(self) -> Interface:
        """The calling convention; raises `CallError` where the capture could not describe it."""
        found = interface_of(self.plan, self.number)
        if found is None:
            raise self._refusal("its arguments or its result are not tensors and constants alone")
        return found

    @property
    def site(self) -> str:
        """The call in words."""
        return str(self.plan.site(self.number))

    @property
    def body(self) -> Body:
        """What crosses its border in the forward."""
        return self.plan.body(Phase.FORWARD, self.number)

    def forward(self, module: nn.Module, values: Sequence[Any]) -> tuple[Any, ...]:
        """Make the call on another module, with flat values as the captured one takes and gives them."""
        named, records = dict(zip(self.body.inputs, values, strict=True)), torch.is_grad_enabled()
        if records and self._casts_once and any(held.requires_grad for held in module.parameters()):
            raise self._refusal(
                "autocast casts its weights once for several calls, whose gradients meet there"
            )
        differentiates = records and self.plan.program.has_backward and self._carries_gradients
        trial = self._trial(module) if differentiates else None
        with ExitStack() as active:
            if trial is not None:
                named = active.enter_context(trial.recording(named))
            elif not self._carries_gradients:
                active.enter_context(above_autograd())
                active.enter_context(torch.no_grad())
            own = named | {name: named[name].clone() for name in self._written if name in named}
            args, kwargs = self._arguments(own)
            tensors = ((name, value) for name, value in named.items() if isinstance(value, Tensor))
            versions = {name: tensor._version for name, tensor in tensors if not tensor.is_inference()}
            active.enter_context(_autocast(self._autocast_at_capture))
            active.enter_context(switched(self.plan.program.calls.rows[self.number].switches))
            with Noting(f"whence was running the {type(module).__name__} in the place of {self.site}"):
                result = module(*args, **kwargs)
            self._refuse_writes(module, named, versions)
            if records and not self._carries_gradients:
                self._refuse_recorded(module, result, own)
            given = self._given(module, self._returned.named(module, result, own), own)
        if trial is not None:
            given = trial.ended(module, given)
        kept = (trial,) if self.body.kept else ()
        return (*(given[name] for name in self.body.outputs), *kept)

    def backward(self, trial: SwapTrial, received: Sequence[Any]) -> tuple[Any, ...]:
        """The backward of such a call."""
        return trial.backward(self.plan.body(Phase.BACKWARD, self.number), received)

    @cached_property
    def _casts_once(self) -> bool:
        """Whether the module is called several times under autocast."""
        if not self._autocast_at_capture:
            return False
        path, preserved = self.plan.site(self.number).path, self.plan.program.calls.preserved
        return sum(self.plan.site(number).path == path for number in preserved) > 1

    def _trial(self, module: nn.Module) -> SwapTrial | None:
        """A run under autograd; None for a call whose interface says nothing of gradients."""
        gradients = self.interface.gradients
        if gradients is None:
            return None
        return SwapTrial(
            self.plan,
            self.number,
            gradients,
            {name: registered_at(module, path) for name, path in self._shared},
        )

    @cached_property
    def _returned(self) -> Returned:
        return Returned(self.plan, self.number, self.interface, frozenset(self._written))

    @property
    def _autocast_at_capture(self) -> tuple[tuple[str, str], ...]:
        """Autocast as it was when the call was made; of graphs from elsewhere, as it was around all of it."""
        program = self.plan.program
        noted = program.calls.rows[self.number].autocast
        return program.circumstances.autocast if noted is None else noted

    @property
    def _carries_gradients(self) -> bool:
        """Whether autograd recorded where the call was made."""
        return self.plan.program.calls.rows[self.number].records

    @cached_property
    def _written(self) -> dict[str, str]:
        """The arguments that the call writes, with the value that each holds afterwards."""
        program, given = self.plan.program, set(self.body.outputs)
        histories = program.facts.versions
        names = {name for name in self.interface.leaves if name}
        versions = {value: name for name, values in histories.items() for value in (name, *values)}
        written = {}
        for name in names:
            later = histories.get(versions.get(name, name), ())
            later = later[later.index(name) + 1 :] if name in later else later
            last = next((value for value in reversed(later) if value in given), None)
            if last is not None:
                written[name] = last
        return written

    @cached_property
    def _current(self) -> dict[str, str]:
        """The value that each argument had when the call was made.

        Where a tensor was written through a view of it, the capture notes it under an earlier value.
        """
        program = self.plan.program
        place, inside = self.plan.positions, program.calls.within(self.number)
        own = [place[name] for name, (_, call) in self.plan.regions.items() if call in inside]
        current = {name: name for name in self.interface.leaves if name}
        if not own:
            return current
        for base, later in program.facts.versions.items():
            before = [name for name in (base, *later) if place.get(name, 0) < min(own)]
            current |= {name: before[-1] for name in current if name in before}
        unknown = sorted(name for name, now in current.items() if now not in self.body.inputs)
        stale = sorted(name for name, now in current.items() if now != name)
        if unknown or (stale and program.has_backward):
            raise self._refusal(f"its argument {(unknown or stale)[0]} was written through a view before")
        return current

    @cached_property
    def _shared(self) -> list[tuple[str, ModulePath]]:
        """The parameters that the graph around reads, too, and where the module holds them."""
        gradients, path = self.interface.gradients, self.plan.site(self.number).path
        held = () if gradients is None else gradients.parameters
        return [row for row in held if is_shared(self.plan, row[0], path)]

    def _arguments(self, named: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        convention = self.interface.convention
        leaves = [
            leaf if name is None else named[self._current[name]]
            for name, leaf in zip(self.interface.leaves, convention.leaves, strict=True)
        ]
        for path, leaf in zip(convention.paths, leaves, strict=True):
            if isinstance(leaf, Absent):
                raise self._refusal(f"its argument {path} is no value of the program: {leaf.reason}")
        return convention.unflatten(leaves)

    def _refuse_writes(self, module: nn.Module, named: Values, versions: dict[str, int]) -> None:
        changed = [name for name, version in versions.items() if named[name]._version != version]
        if changed:
            paths = dict(zip(self.interface.leaves, self.interface.convention.paths, strict=True))
            raise self._returned.misfit(
                module, (f"it writes {paths.get(n) or n}, and the original did not" for n in changed)
            )

    def _refuse_recorded(self, module: nn.Module, result: Any, named: Values) -> None:
        """Results that carry a gradient, by themselves or as arguments do: it led nowhere at capture."""
        carrying = {id(named[name]) for name in self.plan.program.facts.differentiable if name in named}
        leaves = (leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
        if any(leaf.requires_grad or id(leaf) in carrying for leaf in leaves):
            raise CallError(
                f"the {type(module).__name__} in the place of {self.site} cannot be trained here",
                why="its result carries a gradient, and the original's carried none",
                remedy="capture the model with the new module in it",
            )

    def _given(self, module: nn.Module, results: Values, named: Values) -> Values:
        """A value for everything that the captured call hands out."""
        given = {after: named[before] for before, after in self._written.items()}
        path = self.plan.site(self.number).path
        for name in self.body.outputs:
            if name in results:
                given[name] = results[name]
            elif name not in given:
                holder = self._holder(name, path)
                if holder is None and self._is_its_own(name):
                    given[name] = None
                    continue
                if holder is None:
                    what = (
                        f"{name}, computed inside the original, is read outside it and is not in its result"
                    )
                    raise self._refusal(what)
                given[name] = _copy_of_attribute(module, holder)
        return given

    def _is_its_own(self, name: str) -> bool:
        """Whether only calls of the module read a value, or their backward, which is the newcomer's."""
        calls = self.plan.preserved[self.plan.site(self.number).path]
        readers = (self.plan.regions.get(user.name) for user in self.plan.nodes[name].users)
        return all(row is not None and self.plan.original(row[1]) in calls for row in readers)

    def _holder(self, name: str, path: ModulePath) -> ModulePath | None:
        """Where the original held the state that a value is."""
        held = self.plan.program.facts.holders.get(name)
        return None if held is None else first_within(self.plan.program.input(held).attribute_paths, path)

    def _refusal(self, why: str) -> CallError:
        return CallError(
            f"{self.site} cannot be replaced",
            why=why,
            remedy="replace the module in the original model and capture again",
        )


@contextmanager
def _autocast(state: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Autocast as at capture: in the graph the casts are operations, and another module needs it on."""
    with ExitStack() as active:
        for kind, dtype in state:
            active.enter_context(torch.autocast(kind, getattr(torch, dtype.removeprefix("torch."))))
        yield


def _copy_of_attribute(module: nn.Module, path: ModulePath) -> Tensor | None:
    held = registered_at(module, path)
    return held.detach().clone() if isinstance(held, Tensor) else None

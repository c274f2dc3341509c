"""Another module in the place of a preserved one: what the captured graph around it does then.

The graph hands a module flat values and takes flat values back. A preserved call is also handed the arguments
that nothing in it reads, so any module with the original's calling convention can be called in its place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from whence._torch.autograd.nodes import above_autograd
from whence._torch.autograd.switches import switched
from whence._torch.operators.schemas import draws
from whence._torch.operators.table import said_of
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.exported_sizes import order_of
from whence._torch.sizes.symbols import is_symbolic
from whence._torch.tensors import same_bits
from whence.errors import CallError, Fault, Noting
from whence.hierarchy.plan.plan import Body, Plan, first_within
from whence.hierarchy.run.interface import Interface, interface_of
from whence.hierarchy.run.wrapper_subclasses import registered_at
from whence.hierarchy.swap.newcomers import SwapTrial
from whence.hierarchy.swap.state import is_shared
from whence.program import Absent, Constant, Input, Named
from whence.program.node_records import origin_of
from whence.program.signature import describe
from whence.provenance import ModulePath
from whence.schema import Phase


@dataclass(frozen=True)
class Returned:
    """The result of a call as it was captured; `written` are the arguments that the call writes."""

    plan: Plan
    number: int
    interface: Interface
    written: frozenset[str]

    def named(self, module: nn.Module, result: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a module returned for the values `given`, by the names of the original's values.

        Raises `CallError` with all that does not fit.
        """
        expected = self.interface.result
        leaves, spec = tree_flatten(result)
        if spec != expected.spec:
            raise self.misfit(module, [f"it returned {spec}, and the original {expected.spec}"])
        found: dict[str, Any] = {}
        faults = []
        for position, (leaf, value) in enumerate(zip(expected.leaves, leaves, strict=True)):
            where = "its result" if len(leaves) == 1 else f"value {position} of its result"
            if fault := self._fault(leaf, value, given) or self._other_state(leaf, value, module):
                faults.append(f"{where} {fault}")
            elif isinstance(leaf, Named) and found.setdefault(leaf.name, value) is not value:
                faults.append(f"{where} is a tensor of its own, and was another value of it at capture")
        if faults:
            raise self.misfit(module, faults)
        return found

    def misfit(self, module: nn.Module, faults: Iterable[str]) -> CallError:
        """The error about a module that does not fit here."""
        site = self.plan.site(self.number)
        return CallError.of(
            Fault(
                f"the {type(module).__name__} in the place of {site} does not fit: {fault}",
                why="the captured graph around it goes on with what the original returned",
                remedy="give it the original's interface, or capture the model with it",
            )
            for fault in faults
        )

    def _fault(self, leaf: Any, value: Any, given: Mapping[str, Any]) -> str | None:
        match leaf:
            case Constant(known) if type(known) is not type(value) or known != value:
                return f"is {_value_in_words(value)}, and was {known!r} in every run"
            case Named(name) if name in given and name not in self.written:
                new = "is new, and was an argument at capture, which the graph around reads"
                return None if _stands_for(value, given[name]) else new
            case Named(name):
                expected = self.plan.nodes[name].meta["val"]
                return _result_difference(expected, value) or self._other_order(name, expected, value)
        return None

    def _other_order(self, name: str, expected: Any, value: Any) -> str | None:
        """Random numbers are drawn, and memory is read, in the order that the graph has from the capture."""
        if not isinstance(expected, Tensor) or {value.layout, expected.layout} != {torch.strided}:
            return None
        if order_of(value) == order_of(expected):
            return None
        for names, what in (
            (self._drawn_after, "random numbers are drawn for it afterwards"),
            (self._read_after, "what is computed of it afterwards goes by that"),
        ):
            if name in names:
                return f"lies in memory otherwise than the original's, and {what}"
        return None

    @cached_property
    def _drawn_after(self) -> frozenset[str]:
        """The values that random draws follow from."""
        return self._leading_to(lambda node: draws(node.target, node.args, node.kwargs))

    @cached_property
    def _read_after(self) -> frozenset[str]:
        """The values whose layout in memory what is below autograd has from the capture."""
        if not self.plan.program.has_backward:
            return frozenset()
        return self._leading_to(
            lambda node: _asks_layout(node.target) and origin_of(node).phase is Phase.FORWARD
        )

    def _leading_to(self, is_reached: Callable[[fx.Node], bool]) -> frozenset[str]:
        found: set[str] = set()
        for node in reversed(self.plan.nodes.values()):
            reached = node.op == "call_function" and is_reached(node)
            if reached or any(user.name in found for user in node.users):
                found.add(node.name)
        return frozenset(found)

    def _other_state(self, leaf: Any, value: Any, module: nn.Module) -> str | None:
        """State of the original is read from the newcomer by its name, so the newcomer must return it."""
        row = self._state.get(leaf.name) if isinstance(leaf, Named) else None
        if row is None or leaf.name in self.interface.leaves:
            return None
        path = first_within(row.attribute_paths, self.plan.site(self.number).path)
        if path is not None and value is registered_at(module, path):
            return None
        return f"is new, and was {row.path} at capture, which the graph around reads"

    @cached_property
    def _state(self) -> dict[str, Input]:
        return {row.name: row for row in self.plan.program.signature.state}


def _asks_layout(target: Any) -> bool:
    row = said_of(target)
    return row.reads_memory or row.asks_layout


def _stands_for(value: Any, argument: Any) -> bool:
    """Whether the graph may read the argument instead: a value that carries a gradient got it elsewhere."""
    if value is argument or not isinstance(value, Tensor):
        return value is argument
    return not value.requires_grad and same_bits(value, argument)


def _result_difference(expected: Any, value: Any) -> str | None:
    if not isinstance(expected, Tensor):
        return None if not isinstance(value, Tensor) else f"is {_value_in_words(value)}, and was a number"
    if not isinstance(value, Tensor):
        return f"is {_value_in_words(value)}, and was {describe(expected)}"
    sizes = zip(expected.shape, value.shape, strict=False)
    fits = len(expected.shape) == len(value.shape) and all(is_symbolic(e) or e == v for e, v in sizes)
    same = fits and (expected.dtype, expected.device) == (value.dtype, value.device)
    return None if same else f"is {describe(value)}, and was {describe(expected)}"


def _value_in_words(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else repr(value)


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
            active.enter_context(_autocast_restored(self._autocast_at_capture))
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
                held = registered_at(module, holder)
                given[name] = held.detach().clone() if isinstance(held, Tensor) else None
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
def _autocast_restored(state: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Autocast as at capture: in the graph the casts are operations, and another module needs it on."""
    with ExitStack() as active:
        for kind, dtype in state:
            active.enter_context(torch.autocast(kind, getattr(torch, dtype.removeprefix("torch."))))
        yield

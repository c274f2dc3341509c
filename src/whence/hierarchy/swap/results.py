"""What another module returned, compared with what the captured graph goes on with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.operators.schemas import draws
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.exported_sizes import order_of
from whence._torch.sizes.symbols import is_symbolic
from whence.errors import CallError, Fault
from whence.hierarchy.plan.plan import Plan, first_within
from whence.hierarchy.run.interface import Interface
from whence.hierarchy.run.wrapper_subclasses import registered_at
from whence.program import Constant, Input, Named
from whence.program.signature import describe


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
                return f"is {_told(value)}, and was {known!r} in every run"
            case Named(name) if name in given and name not in self.written:
                new = "is new, and was an argument at capture, which the graph around reads"
                return None if _stands_for(value, given[name]) else new
            case Named(name):
                expected = self.plan.nodes[name].meta["val"]
                return _difference(expected, value) or self._other_order(name, expected, value)
        return None

    def _other_order(self, name: str, expected: Any, value: Any) -> str | None:
        """Random numbers are drawn in the order of memory, which the graph has from the capture."""
        if not isinstance(expected, Tensor) or {value.layout, expected.layout} != {torch.strided}:
            return None
        if order_of(value) == order_of(expected) or name not in self._drawn_after:
            return None
        return "lies in memory otherwise than the original's, and random numbers are drawn for it afterwards"

    @cached_property
    def _drawn_after(self) -> frozenset[str]:
        """The values that random draws follow from."""
        found: set[str] = set()
        for node in reversed(self.plan.nodes.values()):
            draw = node.op == "call_function" and draws(node.target, node.args, node.kwargs)
            if draw or any(user.name in found for user in node.users):
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


def _stands_for(value: Any, argument: Any) -> bool:
    """Whether the graph may read the argument instead: a value that carries a gradient got it elsewhere."""
    if value is argument or not isinstance(value, Tensor):
        return value is argument
    return not value.requires_grad and torch.equal(value, argument)


def _difference(expected: Any, value: Any) -> str | None:
    if not isinstance(expected, Tensor):
        return None if not isinstance(value, Tensor) else f"is {_told(value)}, and was a number"
    if not isinstance(value, Tensor):
        return f"is {_told(value)}, and was {describe(expected)}"
    sizes = zip(expected.shape, value.shape, strict=False)
    fits = len(expected.shape) == len(value.shape) and all(is_symbolic(e) or e == v for e, v in sizes)
    same = fits and (expected.dtype, expected.device) == (value.dtype, value.device)
    return None if same else f"is {describe(value)}, and was {describe(expected)}"


def _told(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else repr(value)

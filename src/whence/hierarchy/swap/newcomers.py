"""Another module under autograd inside a captured backward: its recorded forward, and its own backward."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.autograd.nodes import (
    above_autograd,
    as_given,
    gradients_in_pieces,
    keeps_graph,
    leaves_below,
    leaves_of,
)
from whence._torch.observe.hooks import gradient_hooks
from whence._torch.subclasses.wrapper_subclasses import carries_gradients
from whence.errors import CallError, NotDifferentiable
from whence.hierarchy.plan.plan import Body, Plan
from whence.hierarchy.run.gradient_pieces import Piece, Pieces, pieces_in, whole
from whence.hierarchy.run.interface import GradientInterface
from whence.hierarchy.swap.refusal import Refusal
from whence.program.signature import describe
from whence.schema import Phase

_REMEDY = "capture the model with the new module in it"
_NOT_TRAINED = "the captured backward does not call the original, which had no gradient to compute"
_THAW = f"{_REMEDY}, or while the original requires gradients, and freeze it afterwards"


@dataclass
class SwapTrial:
    """One run of a module that took the place of a captured call, and its backward.

    `arguments` are those that carry a gradient, as autograd sees them, `results` what it differentiates, and
    `found` the gradients of the module's own parameters once its backward has run. Parameters `following`
    those that the graph around reads, too, are the graph's to add up the gradients of.
    """

    plan: Plan
    number: int
    gradients: GradientInterface
    following: Mapping[str, Any]
    arguments: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    parameters: tuple[Tensor, ...] = ()
    found: list[tuple[Tensor, list[Piece]]] = field(default_factory=list)

    @contextmanager
    def recording(self, named: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Record what runs inside; gives the values, the `arguments` among them."""
        with above_autograd(), torch.enable_grad():
            known = self.plan.program.facts.differentiable | {*self.gradients.terms}
            carrying = (name for name in named if name in known and _is_float(named[name]))
            self.arguments = {name: as_given(named[name]) for name in carrying}
            yield {name: self.arguments.get(name, value) for name, value in named.items()}

    def ended(self, module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Keep what the backward starts from; gives the values without their history."""
        self.results = {name: v for name, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
        self.parameters = tuple(held for held in module.parameters() if held.requires_grad)
        if self.results and (why := self._obstacle()):
            raise CallError(
                f"the {type(module).__name__} in the place of {self.site} cannot be trained here",
                why=why,
                remedy=_THAW if why == _NOT_TRAINED else f"{_REMEDY}, or run it under torch.no_grad()",
            )
        return {n: v.detach() if isinstance(v, Tensor) else v for n, v in given.items()}

    @property
    def site(self) -> str:
        """The call in words."""
        return str(self.plan.site(self.number))

    def _obstacle(self) -> str:
        backward = self.plan.calls[self.number].backward
        if self.number in self.plan.numbering.repeat_of:
            return "a checkpoint computes the original again in the backward"
        if backward is None or not (backward.inputs and self.plan.calls[self.number].forward.kept):
            return _NOT_TRAINED
        if cut := sorted(filter(self._was_cut, self.results)):
            return (
                f"the original gave {', '.join(cut)} without a gradient, and the new module gives it with one"
            )
        if hooked := [name for name, leaf in self.arguments.items() if gradient_hooks(leaf)]:
            return f"it puts a hook on {', '.join(hooked)}, whose gradient has parts from around it, too"
        if strangers := self._strangers():
            return f"it trains what it does not register: {', '.join(map(describe, strangers))}"
        if handed_on := sorted(self._handed_on(backward)):
            return f"the original hands on gradients as it gets them, of {', '.join(handed_on)}"
        if untold := sorted(self._untold()):
            return f"it hands a value on, and nothing says when {', '.join(untold)} arrive as gradients of it"
        return self.gradients.refusal

    def _was_cut(self, name: str) -> bool:
        """Whether a result carried no gradient at capture, and the graph around uses it."""
        known = self.plan.program.facts.differentiable
        around = (user for user in self.plan.nodes[name].users if not self._is_inside(user.name))
        return bool(known) and name not in known and any(around)

    def _strangers(self) -> list[Tensor]:
        """Leaves that the results lead to and that are neither parameters nor behind arguments."""
        given = list(self.arguments.values())
        behind = (*leaves_below([*given, *self.parameters]), *leaves_of(Refusal, [*self.results.values()]))
        known = {id(tensor) for tensor in (*given, *behind, *self.parameters)}
        return [leaf for leaf in leaves_below([*self.results.values()]) if id(leaf) not in known]

    def _handed_on(self, backward: Body) -> set[str]:
        """Arguments with a gradient that is no value of the call: the graph around adds it by itself."""
        return {
            name
            for name in self.arguments
            for term in self.gradients.terms.get(name, ())
            if term not in backward.outputs and not self._is_inside(term)
        }

    def _untold(self) -> frozenset[str]:
        """The gradients that a result hands on, or stands between, of which nobody knows when they arrive."""
        sources = {id(tensor): name for name, tensor in self.arguments.items()}
        times = Counter(map(id, self.results.values()))
        results = {name for name, held in self.results.items() if times[id(held)] > 1 or id(held) in sources}
        leaves = {sources[id(self.results[name])] for name in results if id(self.results[name]) in sources}
        facts = self.plan.program.facts
        parts = (part.node for name in results | leaves for part in facts.contributions(name))
        return self.plan.untold.intersection(parts)

    def _is_alone(self, name: str) -> bool:
        """Whether all of an argument's gradient came from the original."""
        parts = self.plan.program.facts.contributions(name)
        inside = self.plan.program.calls.within(self.number)
        return bool(parts) and all(part.scope in inside for part in parts)

    def _is_inside(self, value: str) -> bool:
        _, call = self.plan.regions.get(value, (None, -1))
        return call in self.plan.program.calls.within(self.number)

    def backward(self, body: Body, received: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients that leave the call, as the captured backward takes them: in pieces."""
        arrived = self._arrived(dict(zip(body.inputs, received, strict=True)))
        sources = [*self.arguments.values(), *(held for held in self.parameters if held.requires_grad)]
        found = {id(source): arrived.pop(id(source), (source, []))[1] for source in sources}
        if arrived and sources:
            results, parts = zip(*arrived.values(), strict=True)
            totals = [whole(Pieces(tuple(part))) for part in parts]
            own = gradients_in_pieces(results, sources, totals, retain_graph=keeps_graph())
            for source, pieces in zip(sources, own, strict=True):
                found[id(source)] += [Piece(piece, self._at) for piece in pieces]
        named = {**self.arguments, **self.following}
        known = set(map(id, self.following.values()))
        self.found = [(held, found[id(held)]) for held in self.parameters if id(held) in found.keys() - known]
        return self._produced(body, {name: found.get(id(held), ()) for name, held in named.items()})

    def _arrived(self, received: Mapping[str, Any]) -> dict[int, tuple[Tensor, list[Piece]]]:
        """Each result, once, and what arrived for it: one that is an argument hands on the pieces."""
        arrived: dict[int, tuple[Tensor, list[Piece]]] = {}
        for name, tangent in self.gradients.tangents:
            if name in self.results:
                _, parts = arrived.setdefault(id(self.results[name]), (self.results[name], []))
                parts += pieces_in(received[tangent], self.plan.positions[tangent])
        return arrived

    @cached_property
    def _at(self) -> int:
        """When the backward of the original began."""
        inside = self.plan.program.calls.within(self.number)
        own = (self.plan.operations.get((Phase.BACKWARD, call)) for call in inside)
        return min(self.plan.positions[nodes[0].name] for nodes in own if nodes)

    def take(self) -> list[tuple[Tensor, list[Piece]]]:
        """The gradients of the parameters, once for each backward."""
        found, self.found = self.found, []
        return found

    def _produced(self, body: Body, gradients: Mapping[str, Sequence[Piece]]) -> tuple[Any, ...]:
        terms = self.gradients.terms
        lost = [name for name, found in gradients.items() if found and not terms.get(name)]
        owners = {term: (name, not at) for name, found in terms.items() for at, term in enumerate(found)}
        strange = [name for name in body.outputs if name not in owners]
        ignored = [name for name, found in gradients.items() if not found and self._is_alone(name)]
        if lost or strange or ignored:
            why = [
                f"in eager what led to {name} gets no gradient, which the new module ignores"
                for name in ignored
            ]
            why += [f"the original gave {name} no gradient, and the new module does" for name in lost]
            why += [
                f"{name} leaves the original's backward, and is no gradient of an argument"
                for name in strange
            ]
            raise NotDifferentiable(
                f"the backward of {self.site} has no place here", why="; ".join(why), remedy=_REMEDY
            )
        return tuple(self._term(name, *owners[name], gradients) for name in body.outputs)

    def _term(self, term: str, name: str, is_first: bool, gradients: Mapping[str, Sequence[Piece]]) -> Any:
        """The first term of an argument is its whole gradient; that of a parameter that went is none."""
        found = gradients.get(name)
        if is_first and found:
            return Pieces(tuple(found))
        node = self.plan.nodes[term]
        if name not in self.arguments and all(user.op == "output" for user in node.users):
            return None
        like = self.arguments.get(name)
        if like is not None:
            return torch.zeros_like(like)
        fake = node.meta["val"]
        return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and carries_gradients(value)

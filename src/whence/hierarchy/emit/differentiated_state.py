"""The tensors that a call is differentiated with: its own, and those of modules that took places in it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import CallError
from whence.hierarchy.emit.generated_call import carries_gradient
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.run.captured import captured_of
from whence.hierarchy.run.interface import GradientInterface, Interface, readable
from whence.hierarchy.run.wrapper_subclasses import (
    attribute_of,
    holder_of,
    registered_at,
    with_differentiable_parts,
)
from whence.hierarchy.swap.state import Replacing
from whence.provenance import ROOT, ModulePath
from whence.schema import Phase


@dataclass(frozen=True)
class ModuleTensors:
    """What the module of one call holds."""

    plan: Plan
    number: int
    gradients: GradientInterface

    def parameters(self, module: nn.Module, replacing: Replacing) -> list[Any]:
        """What there is a captured gradient for, row by row of `gradients.parameters`; None where it is gone.

        Raises `CallError` where names of one tensor lead to several now, or those of several to one.
        """
        self._refuse_untied(module, replacing)
        rows = self.gradients.parameters
        held = self._once([self._parameter(module, *row, replacing) for row in rows], replacing)
        for (name, _), tensor in zip(rows, held, strict=True):
            if name in self._turned and isinstance(tensor, Tensor):
                tensor.requires_grad_()
        return with_differentiable_parts(module, rows, held, self.plan.program.signature.wholes)

    @cached_property
    def _turned(self) -> frozenset[str]:
        """The state that has a captured gradient because the model itself lets it require one, as runs do."""
        rows = (row for row in self.plan.program.signature.state if self.gradients.terms.get(row.name))
        return frozenset(row.name for row in rows if row.part is None and not row.value.requires_grad)

    def _once(self, held: list[Any], replacing: Replacing) -> list[Any]:
        """Each tensor once: modules that nobody called may share theirs with newcomers; others must not."""
        if not replacing.modules:
            return held
        terms, pairs = self.gradients.terms, zip(self.gradients.parameters, held, strict=True)
        rows = [(path, tensor, bool(terms.get(name))) for (name, path), tensor in pairs]
        used = Counter(id(tensor) for _, tensor, has in rows if has and tensor is not None)
        twice = [str(path) for path, tensor, has in rows if has and used[id(tensor)] > 1]
        if twice:
            raise CallError(
                f"{' and '.join(twice)} are one tensor now, and were several at capture",
                why="the captured backward has a gradient for each of them",
                remedy="tie them in the original model and capture again",
            )
        return [tensor if has or not used[id(tensor)] else None for _, tensor, has in rows]

    def of_newcomers(
        self, parameters: Sequence[Any], replacing: Replacing
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Tensor]]:
        """The parameters of newcomers: all, those that are nobody's else, and those of the graph by name."""
        new = replacing.trainable
        ids = set(map(id, new))
        rows = zip(self.gradients.parameters, parameters, strict=True)
        tied = {name: tensor for (name, _), tensor in rows if id(tensor) in ids}
        known = set(map(id, tied.values()))
        return new, tuple(tensor for tensor in new if id(tensor) not in known), tied

    @cached_property
    def _tied(self) -> list[list[ModulePath]]:
        """The names of each parameter that has several in the module."""
        around = self.plan.site(self.number).path
        rows = self.plan.program.signature.state
        named = ([path for path in row.attribute_paths if path.is_within(around)] for row in rows)
        return [[path.relative_to(around) for path in names] for names in named if len(names) > 1]

    def _refuse_untied(self, module: nn.Module, replacing: Replacing) -> None:
        """Raise `CallError` where names of one tensor lead to several now: it has one captured gradient."""
        around = self.plan.site(self.number).path
        for names in self._tied:
            left = [path for path in names if not replacing.took(path.moved(ROOT, around))]
            if len({id(attribute_of(module, path)) for path in left}) > 1:
                raise CallError(
                    f"{' and '.join(map(str, left))} were one tensor at capture, and are several now",
                    why="the captured backward has one gradient for all of them",
                    remedy="tie them again, or capture the model as it is now",
                )

    def _parameter(self, module: nn.Module, name: str, path: ModulePath, replacing: Replacing) -> Any:
        """The parameter at an attribute path, or under another of its names; None where others took all."""
        if not replacing.modules:
            return self._held(module, name, path)
        left = replacing.holder(name, self.plan.site(self.number).path)
        return None if left is None else self._held(module, name, left)

    def _held(self, module: nn.Module, name: str, path: ModulePath) -> Any:
        """What the module holds; None where that is gone and the captured backward has no gradient for it."""
        try:
            return attribute_of(module, path)
        except AttributeError as error:
            if not self.gradients.terms.get(name):
                return None
            raise self._gone(module, path) from error

    def _gone(self, module: nn.Module, path: ModulePath) -> CallError:
        """The error for a parameter that is gone, by the path under which its module can be replaced."""
        around = self.plan.site(self.number).path
        called = {self.plan.site(number).path for number in self.plan.calls if number != ROOT_CALL}
        modules = [ModulePath(path[:end]) for end in range(1, len(path))]
        taken = [
            name
            for within in modules
            if (name := ModulePath((*around, *within))) in called
            and captured_of(registered_at(module, within) or nn.Module()) is None
        ]
        preserved = (
            f"capture with preserve_calls=[{str(taken[0])!r}], and replace it then; or " if taken else ""
        )
        return CallError(
            f"{ModulePath((*around, *path))} is not there any more",
            why="the captured backward has a gradient for it",
            remedy=f"{preserved}replace the module in the original model and capture again",
        )

    def refuse_thawed(
        self, module: nn.Module, interface: Interface, inputs: Sequence[Any], replacing: Replacing
    ) -> None:
        """Raise `CallError` where something requires a gradient that did not at capture."""
        if not torch.is_grad_enabled():
            return
        frozen = ((name, self._frozen(module, name, path, replacing)) for name, path in self.gradients.frozen)
        thawed = [name for name, tensor in frozen if carries_gradient(tensor)]
        names = self.plan.calls[self.number].forward.inputs
        same = {interface.leaves[second] for _, second in interface.convention.same}
        known = {*self.gradients.terms, *same}
        thawed += [
            n for n, value in zip(names, inputs, strict=True) if carries_gradient(value) and n not in known
        ]
        if thawed:
            around = f" of {self.plan.site(self.number)}" if self.number != ROOT_CALL else ""
            raise CallError(
                f"{', '.join(thawed)}{around} require a gradient now, and did not at capture",
                why="the captured backward does not compute their gradients",
                remedy="capture again, or turn requires_grad off for them",
            )

    def _frozen(self, module: nn.Module, name: str, path: ModulePath, replacing: Replacing) -> Any:
        """A parameter that was frozen, whole if it is made of others; None for one that is gone."""
        if replacing.modules:
            return self._parameter(module, name, path, replacing)
        try:
            return holder_of(module, path)
        except AttributeError:
            return None

    @cached_property
    def _watched(self) -> tuple[tuple[int | None, ModulePath], ...]:
        """The state that the backward reads: the position of a parameter, and where the module holds it.

        It must not change in between. Of state that the program writes a copy is kept.
        """
        program, nodes = self.plan.program, self.plan.nodes
        positions = {name: at for at, (name, _) in enumerate(self.gradients.parameters)}
        held = ((row.name, readable(self.plan, row.name, self.number)) for row in program.signature.state)
        regions = self.plan.regions
        return tuple(
            (positions.get(name), path)
            for name, path in held
            if path is not None
            and name not in program.facts.histories
            and any(regions.get(user.name, (None,))[0] is Phase.BACKWARD for user in nodes[name].users)
        )

    def watched(self, module: nn.Module, parameters: Sequence[Any]) -> Iterator[tuple[ModulePath, Tensor]]:
        """The state that the backward reads, as the module holds it now."""
        for position, path in self._watched:
            now = registered_at(module, path)
            if isinstance(now, Tensor) and (position is None or now is parameters[position]):
                yield path, now

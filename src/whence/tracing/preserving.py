"""Gradients of preserved calls.

Another module may take the place of a preserved call, also in a captured backward. The gradients that it
hands to what is around it are its own then, so each is a value of the call: one that is handed on
as it came, as a residual does it, gets a node of the call that does nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from whence._torch.composed import is_composed
from whence._torch.recording import Recorder
from whence.provenance import ModulePath, PathPattern
from whence.provenance.places import PROGRAM
from whence.tracing.notes import Notes
from whence.tracing.subject import Subject


@dataclass(frozen=True)
class Preserving:
    """The paths of the modules whose calls keep their convention."""

    paths: frozenset[ModulePath] = frozenset()

    def is_inside(self, path: ModulePath) -> bool:
        """Whether a module is a part of a preserved one."""
        return bool(self.paths) and any(above in self.paths for above in path.prefixes() if above != path)

    def below(self, path: ModulePath) -> frozenset[ModulePath]:
        """The preserved ones among a module and its parts, as seen from it."""
        return frozenset(found.relative_to(path) for found in self.paths if found.is_within(path))


def preserving(subject: Subject, patterns: Sequence[str]) -> Preserving:
    """What patterns preserve in a model; the model itself is called by nobody."""
    parsed = [PathPattern.parse(text) for text in patterns]
    paths = (path for path, _ in subject.named_modules() if path) if parsed else ()
    return Preserving(frozenset(path for path in paths if any(row.matches(path) for row in parsed)))


class OwnGradients:
    """Gives preserved calls nodes of their own for the gradients that they hand on."""

    def __init__(self, recorder: Recorder, preserving: Preserving) -> None:
        self._recorder = recorder
        self._preserving = preserving
        self._makers: dict[fx.Node, int] = {}

    def of(
        self, notes: Notes, node: Node, start: int, produced: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """What an autograd node hands on along its edges; `start` is where its operations begin."""
        scope, own = notes.scope_of(node), set(notes.order[start:])
        preserved = (above for above in _around(notes, scope) if self._is_preserved(notes, above))
        if (call := next(preserved, None)) is not None:
            edges = zip(node.next_functions, produced, strict=True)
            produced = tuple(
                _again(gradient)
                if gradient is not None
                and _leaves(notes, target, call)
                and not self._was_made(notes, gradient, call, own)
                else gradient
                for (target, _), gradient in edges
            )
        for gradient in produced:
            if gradient is not None and (made := self._recorder.node_of(gradient)) is not None:
                self._makers.setdefault(made, scope)
        return produced

    def _was_made(self, notes: Notes, gradient: Tensor, call: int, own: set[fx.Node]) -> bool:
        """Whether a gradient is a value of the call; that of a tensor made of others is left as it is."""
        made = None if is_composed(gradient) else self._recorder.node_of(gradient)
        return made is None or made in own or call in _around(notes, self._makers.get(made, PROGRAM))

    def _is_preserved(self, notes: Notes, scope: int) -> bool:
        return notes.scopes[scope].site.path in self._preserving.paths


def _leaves(notes: Notes, target: Node | None, call: int) -> bool:
    """Whether an edge leads out of a call."""
    return target is not None and call not in _around(notes, notes.scope_of(target))


def _around(notes: Notes, scope: int) -> list[int]:
    """A call and those around it, innermost first, without the program."""
    found = []
    while scope != PROGRAM:
        found.append(scope)
        scope = notes.scopes[scope].parent
    return found


def _again(gradient: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.alias.default(gradient)
    return found

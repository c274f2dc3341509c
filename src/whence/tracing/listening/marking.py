"""What is known of a node at the moment when it is recorded."""

from dataclasses import dataclass

from torch import fx, is_grad_enabled

from whence._torch.autograd.nodes import inside_custom_function, next_sequence_number
from whence._torch.operators.table import said_of
from whence._torch.record.annotations import note_annotations
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.attribution.stopped_gradients import Cuts
from whence.tracing.listening.running import Running
from whence.tracing.log.events import Lost, Marked
from whence.tracing.sandbox.hook_lines import Watch
from whence.tracing.source_lines import SourceFinder


@dataclass(frozen=True)
class Marking:
    """Marks nodes."""

    running: Running
    finder: SourceFinder
    grad_modes: Cuts
    watch: Watch

    def of(self, node: fx.Node) -> Marked:
        """What is known of a node now that it is recorded."""
        running = self.running
        scope, phase = running.scope, running.phase
        is_backward = phase is Phase.BACKWARD
        source, borrowed = self.finder.in_call(None if is_backward else running.module)
        note_annotations(node)
        return Marked(
            node,
            scope,
            phase,
            next_sequence_number() - 1,
            source,
            self._cut(node) if phase is Phase.FORWARD else (),
            self.grad_modes.starts,
            said_of(node.target).asks_grad_mode and self.grad_modes.stops,
            inside_custom_function() and not self.grad_modes.is_off,
            recomputed=is_backward and (running.repeats or scope != PROGRAM),
            hook=self.watch.hook(possible=is_backward and source is not None),
            packs=self.watch.packs is not None,
            borrowed=borrowed,
        )

    def _cut(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The arguments of an operation whose gradients stop there."""
        if is_grad_enabled():
            return ()
        if self.grad_modes.is_unknown:
            self.running.log.add(Lost("a custom autograd function, where gradients were off"))
            return ()
        return tuple(node.all_input_nodes) if self.grad_modes.stops else ()

"""Hears autograd's nodes while a backward runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.autograd.graph import Node

from whence._torch.autograd.derivatives import as_eager_takes_it
from whence._torch.autograd.nodes import keys_out
from whence._torch.record.recorder import Recorder
from whence.tracing.attribution.gradient_edges import as_own_nodes
from whence.tracing.attribution.wrapper_subclasses import in_parts
from whence.tracing.listening.running import Running
from whence.tracing.log.events import Stepped
from whence.tracing.replay.differentiating import calls_behind


@dataclass(frozen=True)
class Passes:
    """Writes down every step of a backward.

    With `own_gradients`, a gradient that is handed on as it came is a node of its own where modules exchange
    the value that it is for.
    """

    running: Running
    recorder: Recorder
    own_gradients: bool

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        """An autograd node begins: what is recorded until it ends is its backward."""
        self.running.node_begins(node, self._nodes(in_parts((), received)[1]))

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """An autograd node has ended: note what it hands on, edge by edge."""
        edges, begun, log = keys_out(node), self.running.node_is_over(), self.running.log
        produced = as_eager_takes_it(self.recorder, node, (log.order, begun.start), produced)
        if self.own_gradients:
            produced = as_own_nodes(self.recorder, log, edges, begun.start, produced)
        keys, plain = in_parts(edges, produced)
        handed, end = self._nodes(plain), len(log.order)
        log.add(Stepped(node, begun.start, end, begun.received, handed, keys, calls_behind(node)))
        arrived = (key for key, value in zip(keys, handed, strict=False) if key and value)
        self.running.arrived.update(arrived)
        return produced

    def _nodes(self, tensors: Sequence[Tensor | None]) -> tuple[fx.Node | None, ...]:
        return tuple(None if tensor is None else self.recorder.node_of(tensor) for tensor in tensors)

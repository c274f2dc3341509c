"""The tensors of a run: which nodes hold them, and where their gradients will be collected."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from whence._torch.autograd.nodes import gradient_key, history_of
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten, whole_flatten
from whence._torch.record.recorder import Recorder
from whence._torch.sizes.numbers import as_node, is_recorded
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic, number_of
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.program import Absent, Constant, Named, Structure
from whence.tracing.attribution.wrapper_subclasses import keys_of_parts
from whence.tracing.listening.branches import Branches
from whence.tracing.listening.run_state import RunState
from whence.tracing.log.events import Announced, Crossed


class RunTensors:
    """Finds the nodes that hold tensors, and keeps alive what their keys are made of."""

    def __init__(self, run: RunState, recorder: Recorder, branches: Branches) -> None:
        self._run = run
        self._recorder = recorder
        self._branches = branches
        self._alive: list[object] = []

    def structure(self, value: Any) -> Structure:
        """What a call takes or gives."""
        return self.flattened(value)[1]

    def flattened(self, value: Any) -> tuple[tuple[Any, ...], Structure]:
        """The leaves of what a call takes or gives, and the structure over the nodes that hold them."""
        leaves, spec = whole_flatten(value)
        if any(map(is_composed, leaves)):
            self.note_wholes(value)
            leaves, spec = tree_flatten(value)
        return tuple(leaves), Structure(spec, tuple([self._leaf(leaf) for leaf in leaves]))

    def _leaf(self, leaf: Any) -> Named | Constant | Absent:
        if isinstance(leaf, Tensor):
            node = self.note_key(leaf)
            return Absent("a tensor the capture does not know") if node is None else Named(node.name)
        if is_recorded(leaf):
            return Named(as_node(leaf).name)
        if is_symbolic(leaf) and self._recorder.sizes is not None:
            return Named(self._recorder.sizes.argument(leaf).name)
        if isinstance(leaf, (*SYMBOLIC, *PLAIN)):
            return Constant(number_of(leaf) if isinstance(leaf, SYMBOLIC) else leaf)
        return Absent(f"an object of type {type(leaf).__name__}")

    def note_key(self, tensor: Tensor) -> fx.Node | None:
        """The node that holds `tensor` now, noting where its gradient will be collected."""
        node, log = self._recorder.node_of(tensor), self._run.log
        if node is None:
            self._branches.refuse_leaked(tensor)
        elif node not in log.keys and (key := gradient_key(tensor)) is not None:
            self._alive.append(history_of(tensor) or tensor)
            log.add(Crossed(node, key))
        return node

    def note_wholes(self, value: Any) -> None:
        """As `note_key`, for each tensor in a value that is made of others: its gradient arrives in parts."""
        for whole, tensor, key in keys_of_parts(value):
            node, log = self._recorder.node_of(tensor), self._run.log
            if node is not None and node not in log.keys:
                self._alive += (whole, history_of(whole))
                log.add(Crossed(node, key))

    def announce(self, wholes: Sequence[Tensor]) -> None:
        """Tensors that are made of others, whose gradients are outputs of the program."""
        self._run.log.add(Announced(tuple(map(id, wholes))))
        self.note_wholes(wholes)

    def known(self, tensor: Tensor) -> fx.Node:
        """As `met`, noting where its gradient will be collected."""
        node = self.met(tensor)
        self.note_key(tensor)
        return node

    def met(self, tensor: Tensor) -> fx.Node:
        """The node that holds `tensor`; a tensor that no operation has met becomes a constant."""
        node = self._recorder.node_of(tensor)
        if node is not None:
            return node
        self._recorder.recognised(tensor)
        return self.met(tensor)

    def held(self, leaf: Any) -> fx.Node | None:
        """The node that holds a result; None for a constant."""
        if isinstance(leaf, Tensor):
            return self.known(leaf)
        if is_recorded(leaf):
            return as_node(leaf)  # type: ignore[no-any-return]
        sizes = self._recorder.sizes
        if sizes is None or not is_symbolic(leaf):
            return None
        outermost = (1, None) if len(self._run.log.scopes) > 1 else None
        return sizes.argument(leaf, outermost)  # type: ignore[no-any-return]

    def line_of(self, tensor: Tensor) -> str | None:
        """The user's line that made a tensor."""
        node = self._recorder.node_of(tensor)
        return None if node is None else self._run.places.made(node).line

    def forget(self) -> None:
        """Let go of them."""
        self._alive.clear()

"""Hears what is recorded, node by node."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from whence._torch.autograd.mode_questions import GRAD, mode_now
from whence._torch.autograd.nodes import inside_backward
from whence._torch.files import hook_in_words
from whence._torch.observe.checkpoints import is_in_checkpoint
from whence._torch.operators.schemas import draws, written_nodes
from whence._torch.record.recorder import Recorder
from whence._torch.refusals import history_followed, hook_kept
from whence._torch.sizes.drawn_numbers import DRAWN
from whence.rewriting.functionalize import writes_data
from whence.tracing.listening.model_acts import ModelActs
from whence.tracing.listening.run_state import RunState
from whence.tracing.log.events import Drew, Lost, MadeOfNumbers, Marked, Met, Unpacked


@dataclass(frozen=True)
class Operations:
    """Writes down every node of a recording, and names what it meets.

    `names` are those of tensors that may turn up, by identity: attributes that are neither parameters nor
    buffers.
    """

    run: RunState
    recorder: Recorder
    model: ModelActs
    names: Mapping[int, str]

    def recorded(self, node: fx.Node, of: fx.Node | None = None) -> None:
        """Mark a node with everything that is only known now; a result `of` another with what is known of
        that."""
        self.run.interrupts.let_in()
        if of is not None:
            mark = self.run.log.marks[of]
            self.run.log.add(mark._replace(node=node, cut=(of,) if mark.cut else ()))
        elif node.op == "call_function":
            self._add(self.run.marking.of(node))

    def size_recorded(self, node: fx.Node) -> None:
        """Mark a node that holds a size: it differentiates nothing, and no autograd node was made for it."""
        self.run.interrupts.let_in()
        self._add(self.run.marking.of(node)._replace(moment=-1, cut=()))

    def _add(self, mark: Marked) -> None:
        node, log = mark.node, self.run.log
        log.add(mark)
        if node.target is not DRAWN and draws(node.target, node.args, node.kwargs):
            for event in self._drawn(node):
                log.add(event)
        if (_writes_from_outside(node) or writes_data(node)) and is_in_checkpoint():
            log.add(Lost("a checkpoint that writes again in the backward"))
        if node.target is torch.ops.aten.detach.default and inside_backward() and torch.is_grad_enabled():
            log.add(Unpacked(node))

    def _drawn(self, node: fx.Node) -> Iterator[Drew | Lost]:
        """A random operation is recorded; in a recomputation that rewinds, it repeats one."""
        if (again := self.run.running.drawn_again(node)) is not None:
            yield again
            return
        if self.run.random_states.drew_otherwise():
            yield Lost("a checkpoint that draws other numbers in the backward")
        yield Drew(node)

    def user_of_sizes(self) -> object:
        """The module call or the autograd node that is being recorded."""
        return self.run.running.user_of_sizes()

    def met_tensor(self, tensor: Tensor) -> str:
        """Name a tensor that is neither an input nor state of the model."""
        self.model.branches.refuse_leaked(tensor)
        self.run.random_states.refuse_use(tensor)
        self.run.reads.refuse_left_out(tensor)
        log = self.run.log
        of_loss = log.of_loss.get(id(tensor))
        wanted = self.names.get(id(tensor), None if of_loss is None else of_loss.name)
        name = log.free_name(wanted)
        is_kept = wanted is not None and tensor.grad_fn is not None
        if is_kept and not self.recorder.keeps_composites and mode_now(GRAD):
            raise history_followed(name, self.model.here())
        log.add(Met(name, tensor))
        return name

    def made_of_numbers(self, name: str) -> None:
        """A tensor that the model made of numbers while it ran."""
        self.run.log.add(MadeOfNumbers(name))

    def hook_registered(self, tensor: Tensor, hook: object) -> None:
        """A gradient hook on an activation is part of the backward; one on anything else would stay there."""
        node, log = self.recorder.node_of(tensor), self.run.log
        held = None if node is None else log.inputs.get(node)
        if (is_parameter := isinstance(tensor, nn.Parameter)) or held is not None:
            where = self.run.places.here()
            raise hook_kept(hook_in_words(hook), held or "a parameter", where, is_parameter=is_parameter)
        log.add(Lost(f"the gradient hook {hook_in_words(hook)}"))


def _writes_from_outside(node: fx.Node) -> bool:
    """Whether an operation writes to what was there before the run: state, an argument."""
    return any(written.op == "placeholder" for written in written_nodes(node))

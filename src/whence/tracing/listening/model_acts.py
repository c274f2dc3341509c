"""Hears what the model does beside its operations, and says what cannot be captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.autograd.mode_questions import GRAD, mode_now
from whence._torch.fakes import held_by_argument
from whence._torch.files import hook_in_words
from whence._torch.observe.hooks import gradient_hooks_before
from whence._torch.record.recorder import Recorder
from whence._torch.refusals import history_written, hook_met
from whence._torch.tensor_questions import HELD, HOOKS, IN_PYTHON, Answer, asked_of
from whence.errors import CaptureError, Place
from whence.program import InputQuery, ModeQuery
from whence.provenance import ROOT
from whence.schema import Phase, TensorFact
from whence.tracing.attribution.wrapper_subclasses import COMPOSED, refuse_lost_gradient
from whence.tracing.listening.branches import Branches
from whence.tracing.listening.data_dependence import data_dependent, required, tensors_read, value_of
from whence.tracing.listening.run_state import RunState
from whence.tracing.log.events import (
    DtypeQueried,
    InputQueried,
    Lost,
    MadeContiguous,
    MetComposed,
    ModeQueried,
    TensorAsked,
    TookApart,
)
from whence.tracing.objections import composite_opened
from whence.tracing.source_lines import frame_outside

_OF_TWINS = (TensorFact.STRIDES, TensorFact.REQUIRES_GRAD)
"""What the twin of an argument says as the argument itself does."""


@dataclass(frozen=True)
class ModelActs:
    """What a recording asks, and is told, of the model that runs."""

    run: RunState
    recorder: Recorder
    branches: Branches

    def here(self) -> Place:
        """The module that is running and the user's line."""
        return self.run.places.here()

    def reading(self) -> object:
        """The module that is running, and the user's line."""
        return self.run.places.reading()

    def required(self, condition: str) -> str:
        """What a run says where a condition that the model states does not hold."""
        return f"{condition} does not hold, and torch._check requires it ({self.here()})"

    def stated(self, branching: FrameType | None = None, *, called: bool) -> tuple[bool, str] | None:
        """What a truth has to be where the other side of a branch only raises, and what a run says else."""
        wanted = required(branching or frame_outside(), called=called)
        line = self.run.places.line
        return None if wanted is None else (wanted, f"the model requires otherwise ({line()})")

    def stops_gradients(self) -> bool:
        """In a region that computes without them in every run."""
        return self.run.grad_modes.stops

    def composite_opened(self) -> Exception:
        """Its parts are not in the graph."""
        return self.run.objections.remembered(composite_opened())

    def requires_set(self, tensor: Tensor, wanted: bool) -> None:
        """Of a tensor from outside a program cannot say it again: autograd looks when it runs."""
        node, log = self.recorder.node_of(tensor), self.run.log
        if node is not None and node in log.inputs and tensor.requires_grad != wanted:
            log.add(Lost(f"requires_grad_({wanted}) on {log.inputs[node]}"))

    def asked(self, tensor: Tensor, fact: TensorFact) -> None:
        """What Python decides by the answer holds for inputs of which it is the same.

        An argument answers for itself (`input_asked`), but for its strides and whether it takes a gradient.
        Whether a value has a history it asks of the mode, too: it may have one where gradients are recorded.
        """
        node = self.recorder.node_of(tensor)
        if node is None or (id(tensor) in self.run.log.arguments and fact not in _OF_TWINS):
            return
        if fact in (TensorFact.REQUIRES_GRAD, TensorFact.IS_LEAF):
            self._history_asked(tensor, node, fact)
        else:
            self.run.log.add(TensorAsked(node, fact))

    def _history_asked(self, tensor: Tensor, node: fx.Node, fact: TensorFact) -> None:
        if self.run.running.phase is not Phase.FORWARD or not self.run.places.finder.is_model_asking():
            return
        if not self._is_answered_by_parameters():
            self.run.log.add(TensorAsked(node, fact))
        if node.op != "placeholder" and (tensor.requires_grad or not mode_now(GRAD)):
            self.mode_asked(GRAD)

    def input_asked(self, question: str, tensor: Tensor) -> Answer | None:
        """What a fake twin cannot say is said of the argument itself, and every call has to keep to it.

        What the run has changed of the twin meanwhile holds, with what the argument had counted before. A
        history and a gradient that the argument has are none of the run's: raises `UnsupportedInput`.
        """
        run = self.run
        given = run.log.arguments.get(id(tensor))
        if given is None or not (question in IN_PYTHON or run.places.finder.is_model_asking()):
            return None
        run.objections.distrust("the model looks at where an argument comes from")
        before: Any = given.answers[question]
        answer: Any = asked_of(given.tensor, question)
        now: Any = asked_of(tensor, question)
        module, source = run.places.reading()
        run.log.add(InputQueried(InputQuery(given.position, question, answer, str(module or ""), source)))
        if question in HELD:
            if now and not answer:
                raise held_by_argument(run.log.inputs[given.node], question, self.here())
            return None
        if now == before:
            return answer  # type: ignore[no-any-return]
        return answer + now - before if type(now) is int else now  # type: ignore[no-any-return]

    def differentiated(self, tensor: Tensor) -> None:
        """Hooks that others have on a gradient which the model asks for would run in every call, and change
        it: raises `UnsupportedHook` where there are any."""
        node, run = self.recorder.node_of(tensor), self.run
        if node is None or node.op != "placeholder":
            return
        given = run.log.arguments.get(id(tensor))
        hooks = gradient_hooks_before(tensor if given is None else given.tensor)
        if hooks and (given is not None or self.recorder.keeps_composites):  # a step has those of state
            raise hook_met(hook_in_words(hooks[0]), run.log.inputs.get(node, node.name), self.here())
        if given is None:
            run.log.add(TensorAsked(node, TensorFact.HOOKS))
        else:
            module, source = run.places.reading()
            run.log.add(InputQueried(InputQuery(given.position, HOOKS, True, str(module or ""), source)))

    def leaf_written(self, values: Sequence[Any]) -> None:
        """Raise `UnsupportedMutation` where an argument that has a history is written, or a view of one."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        for tensor in tensors:
            given = self.run.log.arguments.get(id(tensor if tensor._base is None else tensor._base))
            if given is not None and not given.tensor.is_leaf:
                raise history_written(self.run.log.inputs[given.node], self.here())

    def _is_answered_by_parameters(self) -> bool:
        """Whether an encoder asks arguments and parameters in turn, of which a parameter says yes."""
        path, _ = self.run.places.reading()
        return self.run.places.finder.is_encoder_asking() and any(
            row.is_parameter and row.tensor.requires_grad and row.paths[0].is_within(path or ROOT)
            for row in self.run.subject.state
        )

    def mode_asked(self, name: str) -> None:
        """Python asks how a mode is; where the model has set it itself, that is so in every run."""
        run = self.run
        if run.running.phase is not Phase.FORWARD or not run.places.finder.is_model_asking():
            return
        if not run.grad_modes.is_caller_s(name):
            return
        if name == GRAD and run.places.finder.is_given_back():
            run.grad_modes.give_back()
            return
        module, source = run.places.reading()
        run.log.add(ModeQueried(ModeQuery(name, mode_now(name), str(module or ""), source)))

    def gradient_asked(self, tensor: Tensor) -> None:
        """Whether a parameter holds one is no input of a program; it has to be as it is."""
        run = self.run
        path = next((row.paths[0] for row in run.subject.state if row.tensor is tensor), None)
        if path is None or run.running.phase is not Phase.FORWARD or not run.places.finder.is_model_asking():
            return
        _, source = run.places.reading()
        run.reads.reachable.gradient_asked(str(path), tensor, source)

    def memory_asked(self, tensor: Tensor, function: object) -> None:
        """Every run has its tensors elsewhere in memory."""
        if self.run.running.phase is Phase.FORWARD and self.run.places.finder.is_user_asking():
            raise self.value_needed(function, [tensor], function)

    def made_contiguous(self, tensor: Tensor) -> None:
        """In a run with other layouts it might be none."""
        self.run.log.add(MadeContiguous(self.recorder.node_of(tensor)))

    def taken_apart(self, composite: Any) -> None:
        """What a composite is made of in the grad mode of now is recorded in its place."""
        self.run.log.add(TookApart(composite))

    def dtype_asked(self) -> None:
        """The code that runs looks at a dtype; once is enough."""
        log = self.run.log
        if not log.dtypes_asked and self.run.running.phase is Phase.FORWARD:
            log.add(DtypeQueried(str(self.run.places.line() or "a line that is not known")))

    def distrusted(self, reason: str) -> None:
        """The model does something that is another thing where calls are replayed."""
        self.run.objections.distrust(reason)

    def composed_met(self, tensor: Tensor) -> None:
        """One from outside that requires a gradient would get none: raises `UnsupportedInput`."""
        log = self.run.log
        log.add(MetComposed())
        self.run.objections.distrust(COMPOSED)
        differentiated = torch.is_grad_enabled() and self.run.running.phase is Phase.FORWARD
        if differentiated and id(tensor) not in log.wholes:
            refuse_lost_gradient(tensor, self.here)

    # --- errors --------------------------------------------------------------------------------------

    def value_needed(self, operation: object, arguments: Sequence[Any], function: object) -> CaptureError:
        """The error for a Python decision that needs a tensor's value."""
        nodes = filter(None, map(self.recorder.node_of, tensors_read(arguments)))
        values = [value_of(node, self.run.places.made(node), self.run.log.inputs) for node in nodes]
        inside = self.branches.are_recorded
        made = partial(data_dependent, operation, function, values, self.here(), inside=inside)
        self.run.places.needed[:] = [made]
        return made()

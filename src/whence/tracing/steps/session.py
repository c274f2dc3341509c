"""Listens while a training step runs: beside the model, to autograd's passes and to the optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.autograd.nodes import (
    inside_backward,
    next_sequence_number,
    nodes_below_tensors,
    sequence_number,
)
from whence._torch.elsewhere.recorder import recorder_for
from whence._torch.elsewhere.target import Elsewhere
from whence._torch.fakes import FakeTensor, FakeTensorMode
from whence._torch.function_tracer import FunctionTracer
from whence._torch.observe.checkpoints import is_reentrant_checkpoint
from whence._torch.observe.module_calls import ObservedCall
from whence._torch.observe.training_steps import Optimizers, is_around_another, is_one_of, is_scaling
from whence._torch.record.step_recorder import StepRecorder
from whence._torch.sizes.numbers import as_node
from whence.errors import CaptureError, DataDependent, Place, UnsupportedStep
from whence.program.signature import Input, Part
from whence.schema import InputKind, Phase
from whence.tracing.attribution.wrapper_subclasses import root_by_part
from whence.tracing.listening.branches import Branches
from whence.tracing.listening.data_dependence import NO_NUMBERS, value_of
from whence.tracing.listening.model_acts import ModelActs
from whence.tracing.listening.operations import Operations
from whence.tracing.listening.recording import Recording
from whence.tracing.listening.run_state import RunState
from whence.tracing.listening.running import Passes
from whence.tracing.listening.tensors import RunTensors
from whence.tracing.log.events import GradientKept, InputNamed, Reconsidered
from whence.tracing.recording.module_calls import ModuleCalls
from whence.tracing.recording.session import Session
from whence.tracing.replay.replay import replay_of
from whence.tracing.reuse import AnotherAttempt, Reuse
from whence.tracing.steps.counters import roots_of
from whence.tracing.steps.host.schedules import Scheduled
from whence.tracing.steps.notes import BackwardRun, StepNotes, zeros_are_alike
from whence.tracing.steps.optimizer import Optimizing
from whence.tracing.target.subject import StateTensor

SEVERAL = "the step runs several forwards or backwards"
"""Why calls are not replayed."""
StepInput = tuple[Input, fx.Node]
"""An input of the program, and its placeholder."""
_ONES = torch.ops.aten.ones_like.default
_WITH_TENSORS = "compute both sides with tensors, and choose with torch.where"
_IN_PYTHON = (
    "write tensor.item() for float(tensor) and int(tensor), which stays a number of each run; where that "
    'very number is needed, let the example decide with decide="example", and every run must have it'
)
_OTHERWISE = "capture the model with backward=loss and let the optimizer run by itself"


class GradientRead(AnotherAttempt):
    """The step reads a gradient of before: it is an input, where it is that of the model's."""

    def __init__(self, of: str, where: Place) -> None:
        super().__init__(partial(_with_gradients, of, where), of)


def _with_gradients(of: str, where: Place, assumed: Any) -> Any:
    if assumed.takes_gradients:
        raise UnsupportedStep(
            f"{of} has a gradient when the step begins, and the step reads it or adds to it",
            where=where,
            why="gradients of parameters and buffers are inputs of the program, and no others",
            remedy="pass the tensor without a gradient, or a copy: tensor.detach().clone()",
        ) from None
    return replace(assumed, takes_gradients=True)


@dataclass(frozen=True)
class StepCalls(ModuleCalls):
    """Module calls of a step: one after the backward begins another forward."""

    step: StepNotes = field(kw_only=True)

    @contextmanager
    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        if self.run.running.phase is Phase.OPTIMIZER and not self.step.reads_numbers:
            self.run.running.enter_phase(Phase.FORWARD)
            self.run.objections.give_up(SEVERAL)
        with super()._call(module, args, kwargs) as call:
            yield call


@dataclass(frozen=True)
class StepOperations(Operations):
    """Operations of a step, those after the backward among them."""

    model: "StepActs"
    step: StepNotes

    def user_of_sizes(self) -> object:
        """What follows the backward computes sizes once."""
        running = self.run.running
        return (running.scope, "optimizer") if running.phase is Phase.OPTIMIZER else super().user_of_sizes()

    def recorded(self, node: fx.Node, of: fx.Node | None = None) -> None:
        """Marked a node; after a backward, one that autograd follows may be differentiated yet."""
        super().recorded(node, of)
        if self.run.running.phase is Phase.OPTIMIZER and torch.is_grad_enabled():
            self.step.tracked.add(node)

    def met_tensor(self, tensor: Tensor) -> str:
        """A tensor from outside; a gradient of before is an input."""
        if (owner := self.step.owner_of(tensor)) is not None:
            raise GradientRead(self.run.log.inputs[self.step.leaves[owner]], self.model.here())
        return super().met_tensor(tensor)


@dataclass(frozen=True)
class StepActs(ModelActs):
    """What a step does beside its operations: it reads numbers, and sets gradients."""

    recorder: StepRecorder
    step: StepNotes

    @property
    def reads_numbers(self) -> bool:
        """Whether the numbers that are read of tensors now are part of the program: where the optimizer reads
        them, and the step itself, but for one whose numbers may be sizes, too."""
        return self.step.reads_numbers or (self.recorder.environment is None and self.run.running.is_outside)

    def gradient_asked(self, tensor: Tensor) -> None:
        """The step reads `.grad`, which another run may find filled before a gradient arrives."""
        key = id(tensor)
        if key not in self.step.arrived:
            self.step.asked.add(key)
        if (
            key in self.step.leaves
            and tensor.grad is None
            and key not in self.step.arrived | self.step.cleared
        ):
            self.step.assumed.add(key)

    def gradient_set(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """The step writes `.grad` itself; what was there before is gone."""
        if gradient is None or id(tensor) in self.step.leaves:
            self.step.refuse_of_others(tensor, self.here)
            self.step.forget_gradient(tensor, len(self.run.log.order))
        elif not isinstance(tensor, FakeTensor):
            raise UnsupportedStep(
                "the step sets the .grad of a tensor that is not in the model",
                where=self.here(),
                why="the program would not know where to put it",
                remedy="pass a model that holds the tensor",
            )

    def value_needed(self, operation: object, arguments: Sequence[Any], function: object) -> CaptureError:
        """Python needs a tensor's value; a scaler of gradients does so in every step."""
        if is_scaling():
            return self._scaling()
        return super().value_needed(operation, arguments, function)

    def _scaling(self) -> CaptureError:
        return DataDependent(
            "a GradScaler looks whether all gradients are finite, and else skips the optimizer's step",
            where=self.here(),
            why="that is a decision of Python's by the value of a tensor, which a capture does not have",
            remedy='let the example decide with decide="example", and a run where they are not is stale; '
            f"or train in bfloat16, which needs no scaler; or {_OTHERWISE}",
        )

    def number_needed(self, node: fx.Node, remedy: str = "") -> Exception:
        """Python decides by a number of the optimizer, or of the step; or needs it, with what to do then."""
        if roots_of(node) <= self.step.rates | self.step.cycled:
            return AnotherAttempt(lambda assumed: assumed.with_fixed_rates(), "a learning rate is read")
        if is_scaling():
            return self._scaling()
        value = value_of(node, self.run.places.made(node), self.run.log.inputs)
        made = f"{value.made}; " if value.made else ""
        if not remedy:
            let = 'let the example decide with decide="example"; or ' if self.recorder.decider is None else ""
            with_tensors = "use an option that decides with tensors (capturable=True)"
            remedy = f"{let}{with_tensors if self.step.reads_numbers else _WITH_TENSORS}, or {_OTHERWISE}"
        return DataDependent(
            f"the {'optimizer' if self.step.reads_numbers else 'step'} decides by the number {value.name}, "
            "or needs it in Python, which a capture does not have",
            where=self.here(),
            why=f"{made}{NO_NUMBERS}",
            remedy=remedy,
        )

    def number_known(self, number: Any) -> Any:
        """What a number is at the capture; None where it depends on tensors."""
        return self.step.counting.value(number)

    def number_decides(self, target: Any, operands: tuple[Any, ...]) -> Any:
        """What is decided by numbers that steps advance is as it is now; the program says so, and looks.

        A number itself is another one in every run.
        """
        nodes = [value for value in map(as_node, operands) if isinstance(value, fx.Node)]
        roots = set[fx.Node]().union(*map(roots_of, nodes))
        values = list(map(self._number_now, operands))
        if roots <= self.step.rates or None in values:
            raise self.number_needed(nodes[0], _IN_PYTHON if target in (float, int) else "")
        answer = target(*values)
        if type(answer) is float and self.recorder.decider is None:
            raise self.number_needed(nodes[0], _IN_PYTHON)
        inputs = ", ".join(sorted(self.run.log.inputs.get(root, root.name) for root in roots))
        self.recorder.note_branch(target, operands, answer, f"what is asked of {inputs} ({self.here()})")
        return answer

    def _number_now(self, operand: Any) -> Any:
        """What a number is now: one that follows from tensors only where the example decides."""
        known, decider = self.step.counting.value(operand), self.recorder.decider
        node = as_node(operand)
        return decider.number(node) if known is None and decider and isinstance(node, fx.Node) else known


@dataclass(frozen=True)
class StepPasses(Passes):
    """Hears autograd's passes, and the one optimizer that may run."""

    run: RunState
    tensors: RunTensors
    step: StepNotes
    optimizer: Optimizer | Optimizers | None

    @contextmanager
    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], *, creates_graph: bool, fills: bool
    ) -> Iterator[bool]:
        """A pass of autograd: the backward of the step, or one inside a module's forward."""
        if fills:
            self._refuse_pass(roots)
        if not self.running.is_outside or creates_graph or self.running.phase is Phase.BACKWARD:
            yield False
            if fills and creates_graph:
                self._differentiated_again()
            return
        over = self._begin_pass(roots, gradients)
        try:
            yield True
            self.run.objections.look_for_writes()
        finally:
            log = self.run.log
            self.step.runs.append(over(len(log.order), len(log.steps), next_sequence_number()))
            self.running.enter_phase(Phase.OPTIMIZER)

    def _refuse_pass(self, roots: Sequence[Tensor]) -> None:
        if any(map(is_reentrant_checkpoint, nodes_below_tensors(roots))):
            raise UnsupportedStep(
                "a checkpoint with use_reentrant=True is differentiated",
                where=self.run.places.here(),
                why="it rewinds the random number generator in the backward, unseen, and draws there again",
                remedy="use torch.utils.checkpoint with use_reentrant=False, which gives the same numbers",
            )
        if not self.running.is_outside and not inside_backward():
            raise UnsupportedStep(
                "a module calls backward() in its forward",
                where=self.run.places.here(),
                why="what runs inside a call is its forward, and filling .grad is none",
                remedy="call backward() in the step, outside the model",
            )

    def _differentiated_again(self) -> None:
        """A pass that is differentiated again was forward, and what follows is after it."""
        now = (len(self.run.log.order), len(self.run.log.steps)) * 2
        self.step.runs.append(BackwardRun((), *now, next_sequence_number()))
        self.running.enter_phase(Phase.OPTIMIZER)

    def _begin_pass(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Callable[[int, int, int], BackwardRun]:
        """A pass begins; what to note of it when it is over."""
        pairs = [
            (key, self.tensors.known(part), self.tensors.known(seed))
            for root, gradient in zip(roots, gradients, strict=True)
            if gradient is not None
            for key, part, seed in root_by_part(root, gradient)
        ]
        self._belated(roots)
        if self.step.runs:
            self.run.objections.give_up(SEVERAL)
        start = self._seeds_begin([gradient for _, _, gradient in pairs])
        self.running.pass_begins([key for key, *_ in pairs])
        own = tuple((key, gradient) for key, _, gradient in pairs)
        return partial(BackwardRun, own, start, len(self.run.log.steps))

    def _seeds_begin(self, seeds: Sequence[fx.Node]) -> int:
        """Give what was made for the backward alone, just before it, to it; where sums may begin."""
        order = self.run.log.order
        for node in reversed(order):
            if node not in seeds or node.target is not _ONES or node.users:
                break
            self.run.log.add(Reconsidered(node, Phase.BACKWARD))
        return len(order)

    def _belated(self, roots: Sequence[Tensor]) -> None:
        """What came after an earlier backward, with grad mode on, and is differentiated now, was forward."""
        if not self.step.runs:
            return
        before = self.step.runs[-1]
        made = {sequence_number(node) for node in nodes_below_tensors(roots)}
        for node in self.run.log.order[before.end :]:
            mark = self.run.log.marks[node]
            if node in self.step.tracked and mark.moment >= before.moment and mark.moment in made:
                self.run.log.add(Reconsidered(node, Phase.FORWARD))

    def gradient_arrives(self, leaf: Tensor) -> None:
        """A gradient for a leaf: the first one must find none."""
        self.step.gradient_arrives(len(self.run.log.order))
        key = id(leaf)
        if key not in self.step.taken and leaf.grad is self.step.before.get(key, self):
            raise GradientRead(self.run.log.inputs[self.step.leaves[key]], self.run.places.here())
        if isinstance(leaf, FakeTensor) and key not in self.step.leaves:
            return  # the step has made it, and nobody sees its gradient but the step
        if key not in self.step.leaves:
            raise self._without_place(leaf)
        if key in self.step.arrived:
            return
        self.step.arrived.add(key)
        if key not in self.step.cleared | self.step.taken.keys():
            self.step.assumed.add(key)

    def _without_place(self, leaf: Tensor) -> UnsupportedStep:
        """The gradient of a tensor that is no input which has one."""
        turned = next((row.paths[0] for row in self.run.subject.state if row.tensor is leaf), None)
        if turned is not None:
            return UnsupportedStep(
                f"the step turns requires_grad on for {turned}, which gets its first gradient",
                where=self.run.places.here(),
                why="the next step begins with that gradient, and adds to it: another program",
                remedy="run the step once before the capture",
            )
        return UnsupportedStep(
            f"a tensor {list(leaf.shape)} from outside the model gets a gradient",
            where=self.run.places.here(),
            why="it has no name in the model, so the program could not say whose gradient that is",
            remedy="make it an nn.Parameter and pass a model that holds it (nn.ModuleDict of what is "
            "trained together, nn.ParameterDict of single ones), or detach it",
        )

    def gradient_is_kept(self, leaf: Tensor) -> None:
        """What was recorded since has put the gradient into `.grad`."""
        for node in self.run.log.order[self.step.arriving :]:
            self.run.log.add(GradientKept(node, id(leaf)))

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """`zero_grad` takes them away."""
        for parameter in parameters:
            self.step.refuse_of_others(parameter, self.run.places.here)
            self.step.forget_gradient(parameter, len(self.run.log.order))

    def gradients_zeroed(self, parameters: Sequence[Tensor]) -> None:
        """`zero_grad(set_to_none=False)` zeroes them: those of before are zeros from here on."""
        for parameter in parameters:
            self.step.refuse_of_others(parameter, self.run.places.here)
            before = self.step.before.get(id(parameter))
            if id(parameter) in self.step.taken:
                continue
            if before is None or parameter.grad is not before or not zeros_are_alike(parameter, before):
                continue
            with torch.no_grad():
                parameter.grad = torch.zeros_like(parameter)
            self.step.zeroed[id(parameter)] = ref(parameter.grad)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A hook on a parameter is the step's own code: it may run an optimizer, or write gradients."""
        with self.running.in_phase(Phase.OPTIMIZER), self.recorder.watching_functions():
            yield

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """The optimizer's step, which reads numbers of its state and is not being compiled, or one around."""
        self._refuse_optimizer(optimizer)
        self.running.enter_phase(Phase.OPTIMIZER)
        with nullcontext() if is_around_another(optimizer) else self.step.optimizing():
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """The optimizer asks for the loss and its gradients: a forward and a backward of the step."""
        phase = Phase.OPTIMIZER if self.step.runs else Phase.FORWARD
        with self.running.in_phase(phase), self.step.optimizing(reads_numbers=False):
            yield

    def scheduling(self, schedule: LRScheduler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A schedule is called, which runs when the step is bound, and not now."""
        call = Scheduled(schedule, args, kwargs, self.run.places.here())
        if not self.running.is_outside:
            raise self._scheduled(call, "a module runs it in its forward")
        self.step.scheduling.note(call, lambda path: self._scheduled(call, f"the step reads {path} after it"))

    def _scheduled(self, call: Scheduled, what: str) -> UnsupportedStep:
        return UnsupportedStep(
            f"{call.path} moves numbers, and {what}",
            where=self.run.places.here(),
            why="a bound step calls schedules when all else is done, and they move what the next step takes",
            remedy="read it before the schedule is called; or call the schedule after the captured step",
        )

    def _refuse_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if not is_one_of(optimizer, self.optimizer):
            raise UnsupportedStep(
                f"the step runs an optimizer ({name}) that the capture was not given",
                where=self.run.places.here(),
                why="its state would be constants of the program",
                remedy="make it outside, and pass it as optimizer=; several as optimizer=[first, second]",
            )
        if not self.running.is_outside:
            raise UnsupportedStep(
                f"a module runs the optimizer ({name}) in its forward",
                where=self.run.places.here(),
                why="what runs inside a call is its forward",
                remedy="call optimizer.step() in the step, outside the model",
            )


@dataclass(frozen=True)
class StepSession(Session):
    """A session of a whole step."""

    recorder: StepRecorder
    passes: StepPasses
    step: StepNotes = field(kw_only=True)
    fills_gradients = True

    def end(self) -> None:
        super().end()
        vars(self.recorder.arithmetic).clear()

    def input_row(
        self,
        node: fx.Node,
        path: str,
        *,
        said: str = "",
        of: StateTensor | None = None,
        kind: InputKind = InputKind.OPTIMIZER_STATE,
        part: Part | None = None,
    ) -> StepInput:
        """The row of an input beside the model's, perhaps `of` a parameter; `said` is what errors call it."""
        self.log.add(InputNamed(node, said or path))
        value = self.step.counting.known.get(node, node.meta["val"])
        made = Input(node.name, kind, path, value=value, part=part)
        if of is None:
            return made, node
        return replace(made, module=of.paths[0].parent, module_type=of.owner, of=str(of.paths[0])), node

    def number_input(self, name: str, path: str, value: Any, **words: Any) -> tuple[Any, StepInput]:
        """What stands for a number of Python's that becomes an input, and its row."""
        number, node = self.recorder.number_input(name)
        self.step.counting.known[node] = value
        return number, self.input_row(node, path, **words)

    def is_plainly_eager(self) -> bool:
        """An optimizer that is told that it is being compiled computes otherwise, and gives other bits."""
        return self.step.reads_numbers


def new_step_session(
    run: RunState,
    mode: FakeTensorMode,
    names: Mapping[int, str],
    reuse: Reuse,
    found: Optimizing,
    elsewhere: Elsewhere | None = None,
) -> StepSession:
    """What hears the run of a step, in which no optimizer but this one may run."""
    branches, functions = Branches(run, differentiates=reuse.joint), FunctionTracer()
    step = StepNotes(begins=not any(found.pieces()))
    recorder = recorder_for(
        elsewhere,
        StepRecorder,
        lambda recorder: StepOperations(run, recorder, StepActs(run, recorder, branches, step), names, step),
        mode,
        functions=functions,
    )
    tensors = RunTensors(run, recorder, branches)
    passes = StepPasses(run.running, recorder, False, run, tensors, step, found.optimizer)
    replay = replay_of(Recording(run, recorder, tensors, passes), reuse, functions)
    calls = StepCalls(run, tensors, branches, replay, recorder.watching_functions, step=step)
    return StepSession(run, recorder, tensors, passes, branches, replay, calls, step=step)

"""What is noted while a training step runs: passes of autograd, gradients, numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, fx

from whence._torch.fakes import FakeTensor
from whence._torch.subclasses.wrapper_subclasses import is_composed, layout_of, plain_parts
from whence.errors import CaptureError, Place, UnsupportedStep
from whence.program.arguments.optimizer_arguments import Outside
from whence.tracing.log.log import Log
from whence.tracing.steps.counters import Counting
from whence.tracing.steps.host.schedules import Scheduling

_GRADIENT = attrgetter("grad")


@dataclass(frozen=True)
class BackwardRun:
    """One pass of autograd: the part of the recorded operations and of the steps that is its own.

    `moment` is the number of the first autograd node that was made after it.
    """

    roots: tuple[tuple[Any, fx.Node], ...]
    start: int
    first: int
    end: int
    last: int
    moment: int

    def part_of(self, log: Log) -> Log:
        """The log as it was when it ended, with its steps alone."""
        return log.until(self.end, slice(self.first, self.last))


@dataclass
class StepNotes:
    """What is noted of a step: passes of autograd, and what became of gradients.

    `before` are gradients that were there when it began, by the identity of the tensor, `taken` the inputs
    that are those of them, or their parts. `cleared` and `assumed` are parameters whose gradient was taken
    away, or was absent, before the first one arrived.
    `forgotten` says of parameters among the `assumed` how many operations there were when their gradient was
    taken away again, `asked` of which ones Python asked for the gradient before one arrived. `zeroed` are
    the zeros in the place of gradients of before that were filled with them, by parameter. `tracked` are
    operations after a backward that autograd may go through again. `counting` are the numbers that are
    inputs, `rates` those of them that are learning rates, `cycled` momenta that a schedule moves, too.
    `arriving` is how much had been recorded when a gradient arrived last. While the optimizer runs, the step
    `reads_numbers`. `scheduling` has the calls of
    schedules. The optimizer `begins` where it has no state yet.
    `state` are the model's tensors, and `others` those besides whose gradient the step would take away, and
    which have none.
    """

    begins: bool
    state: frozenset[int] = frozenset()
    others: dict[int, Tensor] = field(default_factory=dict)
    leaves: dict[int, fx.Node] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    counting: Counting = field(default_factory=Counting)
    rates: set[fx.Node] = field(default_factory=set)
    cycled: set[fx.Node] = field(default_factory=set)
    runs: list[BackwardRun] = field(default_factory=list)
    reads_numbers: bool = False
    cleared: set[int] = field(default_factory=set)
    assumed: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    forgotten: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    zeroed: dict[int, ReferenceType[Tensor]] = field(default_factory=dict)
    tracked: set[fx.Node] = field(default_factory=set)
    arriving: int = 0
    scheduling: Scheduling = field(default_factory=Scheduling)

    def begin(self, leaves: Sequence[tuple[Tensor, fx.Node]], state: Iterable[Tensor]) -> None:
        """A step begins on these leaves, and on all that the model holds."""
        self.state = frozenset(map(id, state))
        self.leaves |= {id(tensor): node for tensor, node in leaves}
        self.before |= {id(tensor): tensor.grad for tensor, _ in leaves if tensor.grad is not None}

    def owner_of(self, tensor: Tensor) -> int | None:
        """The tensor whose gradient of before that one is, or is a part of."""
        rows = ((key, part) for key, held in self.before.items() for _, part in plain_parts(held))
        return next((key for key, part in rows if part is tensor), None)

    @contextmanager
    def optimizing(self, *, reads_numbers: bool = True) -> Iterator[None]:
        """Inside the block the optimizer runs, or the closure that it calls, which reads no numbers."""
        before, self.reads_numbers = self.reads_numbers, reads_numbers
        try:
            yield
        except CaptureError as error:
            raise error.in_first_step(holds=self.begins and self.reads_numbers) from None
        finally:
            self.reads_numbers = before

    def gradient_arrives(self, recorded: int) -> None:
        """After so many operations a gradient arrives at a leaf."""
        self.arriving = recorded

    def refuse_of_others(self, tensor: Tensor, here: Callable[[], Place]) -> None:
        """A program leaves gradients of tensors that are not the model's as they are: raise `UnsupportedStep`
        where the step takes one away, and note where there is none."""
        if id(tensor) in self.state or isinstance(tensor, FakeTensor):
            return
        if tensor.grad is not None:
            raise UnsupportedStep(
                f"the step takes away the .grad of a tensor {list(tensor.shape)} that is not in the model",
                where=here(),
                why="a run of the program leaves the gradients of tensors that it has no name for",
                remedy="pass a model that holds the tensor, such as nn.ModuleList of both models",
            )
        self.others[id(tensor)] = tensor

    def gradients_of_others(self) -> list[Outside]:
        """Those that have to be absent in every run, as they were."""
        name = "the gradient of a tensor {} outside the model"
        return [
            Outside(name.format(list(tensor.shape)), tensor, (_GRADIENT,), None)
            for tensor in self.others.values()
        ]

    def forget_gradient(self, parameter: Tensor, recorded: int) -> None:
        """After so many operations a parameter's gradient is taken away."""
        self.cleared.add(key := id(parameter))
        if key in self.assumed:
            self.forgotten.setdefault(key, recorded)

    def needs_no_gradient(self, key: int, log: Log, results: Set[fx.Node]) -> bool:
        """Whether it makes no difference what a parameter's gradient was: what became of it was taken away,
        and nobody has read it; `results` are what the step returns."""
        if key not in self.forgotten or key in self.asked:
            return False
        early = set(log.order[: self.forgotten[key]])
        held = {node for node, leaf in log.kept.items() if leaf == key and node in early}
        return not held & results and all(user in held for node in held for user in node.users)


def zeros_are_alike(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether zeros like the parameter are like the gradient, too, which is nobody else's memory."""
    if is_composed(gradient) or is_composed(parameter):
        return type(gradient) is type(parameter) and layout_of(gradient) == layout_of(parameter)
    if gradient.layout is not torch.strided or gradient.dtype != parameter.dtype:
        return False
    if gradient.untyped_storage().nbytes() != gradient.nbytes:
        return False
    return gradient.stride() == torch.empty_like(parameter, device="meta").stride()

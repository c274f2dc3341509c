"""What is noted while a training step runs: passes of autograd, gradients, numbers."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from torch import Tensor, fx

from whence.errors import CaptureError
from whence.tracing.log.log import Log
from whence.tracing.steps.counters import Counting
from whence.tracing.steps.host.schedules import Scheduling


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

    `before` are gradients that were there when it began, by the identity of the tensor, `taken` those of them
    that are inputs. `cleared` and `assumed` are parameters whose gradient was taken away, or was absent,
    before the first one arrived.
    `forgotten` says of parameters among the `assumed` how many operations there were when their gradient was
    taken away again, `asked` of which ones Python asked for the gradient before one arrived. `zeroed` are
    the zeros in the place of gradients of before that were filled with them, by parameter. `tracked` are
    operations after a backward that autograd may go through again. `counting` are the numbers that are
    inputs, `rates` those of them that are learning rates, `cycled` momenta that a schedule moves, too.
    `arriving` is how much had been recorded when a gradient arrived last. While the optimizer runs, the step
    `reads_numbers`. `scheduling` has the calls of
    schedules. The optimizer `begins` where it has no state yet.
    """

    begins: bool
    leaves: dict[int, fx.Node] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, fx.Node] = field(default_factory=dict)
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

    def begin(self, leaves: Sequence[tuple[Tensor, fx.Node]]) -> None:
        """A step begins on these leaves."""
        self.leaves |= {id(tensor): node for tensor, node in leaves}
        self.before |= {id(tensor): tensor.grad for tensor, _ in leaves if tensor.grad is not None}

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

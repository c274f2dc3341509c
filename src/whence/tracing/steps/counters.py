"""Numbers of Python's that an optimizer advances in every step: counts, products of decay rates.

They are state as tensors are: each is an input of the program, and what the step makes of it an output. Which
numbers these are is known after a first run, and so is what an optimizer without state begins with: the
number of which the step makes what was found after the first one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from whence._torch.sizes.numbers import as_node, evaluated, is_recorded
from whence.program.arguments.optimizer_arguments import Initial, Setting
from whence.tracing.steps.optimizer import is_same_value

GroupKey = tuple[int, str]
"""The number of a parameter group, and the name of a value in it."""
_BEGINNINGS = (0, 1, 0.0, 1.0)
"""What counts, sums and products begin with."""


@dataclass(frozen=True)
class Counter:
    """A number that steps advance. `after` is what the first step leaves, where there was none before.

    `begins` is what it is then assumed to begin with, and `tried` what it was assumed to before.
    """

    after: Any = None
    begins: Any = None
    tried: tuple[Any, ...] = ()

    @property
    def initial(self) -> Initial | None:
        """What is put there for a first step; None where the number exists already."""
        return None if self.after is None else Initial(self.begins)


@dataclass
class Counting:
    """The numbers that are inputs in one run, with what each is now; `inputs` are those of the optimizer."""

    known: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: dict[str, fx.Node] = field(default_factory=dict)

    def value(self, found: Any) -> Any:
        """A number as Python has it; None where it depends on what only a run knows."""
        return evaluated(as_node(found), self.known)


def first_guess(after: Any) -> Counter:
    """A count begins one below what the first step leaves; of another number nothing is known yet."""
    return Counter(after, after - 1 if type(after) is int else after)


def better_guess(counter: Counter, path: str, found: Any, counting: Counting) -> Counter | None:
    """The counter with a beginning of which the step makes what a first one leaves; None without one.

    `found` is what the step made of the number that is at `path`.
    """
    node = counting.inputs[path]

    def made_of(beginning: Any) -> Any:
        return evaluated(as_node(found), {**counting.known, node: beginning})

    from_nothing = made_of(type(counter.after)(0))
    difference = () if from_nothing is None else (counter.after - from_nothing,)
    tried = (*counter.tried, counter.begins)
    for beginning in (counter.begins, *_BEGINNINGS, *difference, counter.after):
        made = made_of(beginning)
        is_right = type(made) is type(counter.after) and made == counter.after
        if is_right and beginning is counter.begins:
            return counter
        if is_right and beginning not in tried:
            return replace(counter, begins=beginning, tried=tried)
    return None


def changed_settings(
    before: Sequence[Setting], now: Sequence[Setting]
) -> Iterator[tuple[Setting, Setting | None]]:
    """What a step changed in the groups of an optimizer, as it is now, and as it was."""
    then = {row.path: row for row in before}
    for row in now:
        earlier = then.pop(row.path, None)
        if earlier is None or not is_same_value(earlier.value, row.value):
            yield row, earlier
    for row in then.values():
        yield replace(row, value=None), row


def replaced_numbers(
    counting: Counting, found: Mapping[str, Any], constant: Callable[[Any], fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The input of each number that the step advanced, with the node that holds the new one; `constant` makes
    one for a number that is always the same."""
    for path, node in counting.inputs.items():
        value, before = found[path], counting.known[node]
        if is_recorded(value):
            yield from () if as_node(value) is node else ((node, as_node(value)),)
        elif type(value) is not type(before) or value != before:
            yield node, constant(value)


def roots_of(node: fx.Node) -> set[fx.Node]:
    """The inputs and constants that a node is computed of."""
    waiting, found = [node], set()
    while waiting:
        current = waiting.pop()
        waiting += current.all_input_nodes
        found |= set() if current.all_input_nodes else {current}
    return found

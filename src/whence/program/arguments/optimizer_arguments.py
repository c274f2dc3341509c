"""What a program of a training step needs of an optimizer, and of gradients, beside its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whence._torch.observe.attribute_reads import NOTHING
from whence.program.arguments.host_state import HostCall, HostEffect, HostNumber, HostPlace
from whence.program.guards.in_words import OfClass


@dataclass(frozen=True)
class Initial:
    """What an optimizer's first step puts under a key: a tensor like `like`, whose elements are all `value`.

    Without `like` it is `value` itself.
    """

    value: Any
    like: Tensor | None = None


@dataclass(frozen=True)
class StateSlot:
    """The input that holds `optimizer.state[parameter][key]`; `parameter` is a qualified name.

    `initial` is what the first step makes where there is nothing; None where that is not known.
    """

    input: str
    parameter: str
    key: str
    initial: Initial | None = None


@dataclass(frozen=True)
class GroupSlot:
    """The input that holds `optimizer.param_groups[group][key]`, a number or a tensor.

    `initial` is what an optimizer that has not taken a step begins with; None where it has a value by itself.
    """

    input: str
    group: int
    key: str
    initial: Initial | None = None


@dataclass(frozen=True)
class CycledSlot:
    """The input that holds a momentum which a schedule moves: `optimizer.param_groups[group][key]`, or the
    first number of a tuple there, of which `rest` are the others."""

    input: str
    group: int
    key: str
    rest: tuple[Any, ...] | None = None

    @property
    def path(self) -> str:
        """How a person reads it."""
        first = "" if self.rest is None else "[0]"
        return f"optimizer.param_groups[{self.group}][{self.key!r}]{first}"

    def now(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """The number there; None where the others are not as they were."""
        held = groups[self.group].get(self.key)
        if self.rest is None:
            return held
        is_right = isinstance(held, tuple | list) and tuple(held[1:]) == self.rest
        return held[0] if is_right else None  # type: ignore[index]


OWN = -1
"""In the place of the number of a parameter group."""


def home_of(optimizer: Any, group: int) -> dict[str, Any]:
    """Where an optimizer holds the values of a group, or those of its own."""
    return vars(optimizer) if group == OWN else optimizer.param_groups[group]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Setting:
    """A value of a parameter group that the program was recorded with: another one is another program.

    Where `group` is `OWN` it is one that the optimizer holds itself.
    """

    group: int
    key: str
    value: Any

    @property
    def path(self) -> str:
        """How a person reads it."""
        if self.group == OWN:
            return f"optimizer{self.key}" if self.key.startswith("[") else f"optimizer.{self.key}"
        return f"optimizer.param_groups[{self.group}][{self.key!r}]"

    @property
    def is_beginning(self) -> bool:
        """Whether it is the learning rate that a schedule began with, which optimizers do not read."""
        return self.key == "initial_lr"


@dataclass(frozen=True, eq=False)
class Outside:
    """A value that the step reads outside of itself: a constant of the program.

    `path` is how a person reads it. `way` leads from `root` to whatever is there by now.
    """

    path: str
    root: Any
    way: tuple[Callable[[Any], Any], ...]
    value: Any

    def __deepcopy__(self, _known: object) -> "Outside":
        """A copy of a program speaks of what the same step reads."""
        return self

    def now(self) -> Any:
        """What is there; `NOTHING` where nothing is."""
        held = self.root
        try:
            for step in self.way:
                held = step(held)
        except (AttributeError, LookupError, TypeError, ValueError):
            return NOTHING
        return held


@dataclass(frozen=True, eq=False)
class Step:
    """A training step that was captured.

    `call` is the user's function and `optimizer` the captured one, by reference. `groups` are the parameters
    of its groups by name. `with_gradient` are parameters whose `.grad` has to be a tensor when the step
    begins, which zeroes it, `without_gradient` those whose `.grad` has to be None when the step
    begins, `cleared` those whose `.grad` is None afterwards, whatever it was.
    `outside` are values that it reads from variables and objects around it. `empty` is state that is None, by
    parameter and key: a first step puts it there. `counted` are numbers around the step that it advances,
    and `effects` what else it puts there. `calls` are those of schedules, in order. `graph` is the graph that
    was captured, as long as no pass has made another one of it. A `second` step is another program than the
    first, which only the step itself takes.
    """

    call: Callable[..., Any]
    optimizer: Any = None
    groups: tuple[tuple[str, ...], ...] = ()
    settings: tuple[Setting, ...] = ()
    states: tuple[StateSlot, ...] = ()
    numbers: tuple[GroupSlot, ...] = ()
    cycled: tuple[CycledSlot, ...] = ()
    without_gradient: frozenset[str] = frozenset()
    with_gradient: frozenset[str] = frozenset()
    cleared: frozenset[str] = frozenset()
    outside: tuple[Outside, ...] = ()
    empty: tuple[tuple[str, str], ...] = ()
    counted: tuple[HostNumber, ...] = ()
    effects: tuple[HostEffect, ...] = ()
    calls: tuple[HostCall, ...] = ()
    graph: Any = None
    second: bool = False

    @property
    def places(self) -> tuple[HostPlace, ...]:
        """Where it puts numbers and other things around it."""
        return (*(row.place for row in self.counted), *(row.place for row in self.effects))

    @property
    def optimizer_class(self) -> type:
        """The class of the captured optimizer, which a loaded program has not."""
        return self.optimizer.kind if isinstance(self.optimizer, OfClass) else type(self.optimizer)

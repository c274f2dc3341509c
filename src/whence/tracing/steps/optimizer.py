"""What an optimizer holds, looked at before a step is captured and given back afterwards."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.observe.hooks import described
from whence._torch.observe.training_steps import (
    Optimizers,
    as_one_optimizer,
    is_optimizer,
    members_of,
    optimizer_hooks,
    own_values,
    parameters_of,
)
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.numbers import is_recorded
from whence._torch.subclasses.fully_sharded import name_of_class
from whence.dependence.snapshots import Saved, save_all
from whence.errors import Fault, Place, UnsupportedHook, UnsupportedStep, UsageError
from whence.program.arguments.optimizer_arguments import OWN, Setting
from whence.tracing.steps.enclosed_state import has_state, refuse_changed
from whence.tracing.target.subject import StateTensor, Subject

RATE = "lr"
"""The value of a parameter group that schedules change between steps: an input, where that can be."""
Key = tuple[int, str]
"""The identity of a parameter, and the name of a piece of its state."""


@dataclass(frozen=True)
class OptimizerEntry:
    """A piece of the optimizer's state: whose it is, under which key, and what it is."""

    parameter: StateTensor
    key: str
    value: Any

    @property
    def place(self) -> Key:
        """Where it is."""
        return id(self.parameter.tensor), self.key

    @property
    def path(self) -> str:
        """How a person reads it."""
        return f"optimizer.state[{str(self.parameter.paths[0])!r}][{self.key!r}]"


@dataclass(frozen=True)
class Optimizing:
    """An optimizer and the model's parameters in its groups."""

    optimizer: Optimizer | Optimizers | None
    groups: tuple[tuple[StateTensor, ...], ...] = ()

    @property
    def parameters(self) -> Iterator[StateTensor]:
        """Group by group."""
        return (row for group in self.groups for row in group)

    def held(self) -> list[OptimizerEntry]:
        """The state, parameter by parameter, in the optimizer's order of keys."""
        if self.optimizer is None:
            return []
        state = self.optimizer.state
        return [
            OptimizerEntry(row, key, value)
            for row in self.parameters
            if row.tensor in state
            for key, value in state[row.tensor].items()
        ]

    def settings(self) -> list[Setting]:
        """Everything else in the groups, and numbers that are attributes."""
        return [*self._of_groups(), *filter(self._is_counted, self._beside())]

    def _of_groups(self) -> list[Setting]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            Setting(number, key, copy_of(value))
            for number, group in enumerate(groups)
            for key, value in group.items()
            if key != "params"
        ]

    def own(self) -> list[Setting]:
        """Plain values that the optimizer holds itself, but for numbers that are attributes."""
        return [row for row in self._beside() if is_plain(row.value) and not self._is_counted(row)]

    def _is_counted(self, row: Setting) -> bool:
        return row.key in vars(self.optimizer) and is_countable(row.value)

    def _beside(self) -> list[Setting]:
        held = {} if self.optimizer is None else own_values(self.optimizer)
        return [Setting(OWN, key, copy_of(value)) for key, value in held.items()]


def optimizing(subject: Subject, optimizer: object) -> Optimizing:
    """Look at an optimizer; raises a `WhenceError` for what cannot be captured."""
    optimizer = as_one_optimizer(optimizer)
    if optimizer is None:
        return Optimizing(None)
    if not isinstance(optimizer, Optimizer | Optimizers) or not is_optimizer(optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}",
            remedy="pass a torch.optim.Optimizer, a list of them, or None where the step updates parameters "
            "itself; of one that stands for another, as Accelerate's, pass that one (.optimizer), whichever "
            "the step calls",
        )
    _refuse_hooks(optimizer)
    rows = {id(row.tensor): row for row in subject.state}
    strangers = [tensor for tensor in parameters_of(optimizer) if id(tensor) not in rows]
    if strangers:
        raise UnsupportedStep(
            f"{len(strangers)} of the optimizer's parameters are not in {name_of_class(subject.roots[0][1])}",
            why="they have no name in the model: "
            + ", ".join(f"a tensor {list(t.shape)}" for t in strangers[:5]),
            remedy="pass a model that holds all of them, such as nn.ModuleDict of what is trained together",
        )
    _refuse_shared(optimizer, rows)
    groups = tuple(tuple(rows[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    found = Optimizing(optimizer, groups)
    _refuse_values(found)
    return found


def _refuse_shared(optimizer: Optimizer | Optimizers, rows: Mapping[int, StateTensor]) -> None:
    counts = Counter(map(id, parameters_of(optimizer)))
    if several := [str(rows[key].paths[0]) for key, count in counts.items() if count > 1]:
        raise UnsupportedStep(
            f"several optimizers hold {', '.join(several)}",
            why="its state would have the same name in each",
            remedy="capture a step for each optimizer",
        )


def _refuse_hooks(optimizer: Optimizer | Optimizers) -> None:
    hooks = optimizer_hooks(optimizer)
    if hooks:
        raise UnsupportedHook(
            f"there are hooks on the optimizer's step: {'; '.join(map(described, hooks))}",
            why="what they do in Python would happen once, in the capture, and never again",
            remedy="remove them for the capture, and do in the step what they do",
        )


def _refuse_values(found: Optimizing) -> None:
    faults = [
        Fault(
            f"{row.path} is a {type(row.value).__name__}",
            why="the state of an optimizer is recorded where it is made of tensors and numbers; this would "
            "be a constant of the program",
            remedy="use an optimizer that keeps its state in tensors, as those of torch.optim do; or capture "
            "the model with backward=loss and run the optimizer itself",
        )
        for row in found.held()
        if not isinstance(row.value, (Tensor, type(None))) and type(row.value) not in (int, float)
    ]
    faults += [
        Fault(
            f"{setting.path} is a {type(setting.value).__name__}",
            why="only numbers, texts and tensors can be compared with what they are in later steps",
            remedy="use plain numbers in parameter groups",
        )
        for setting in found.settings()
        if not (is_plain(setting.value) or isinstance(setting.value, Tensor))
    ]
    if faults:
        raise UnsupportedStep.of(faults)


def is_plain(value: object) -> bool:
    """Whether a value can be kept and compared: Python's own, or tuples, lists and dictionaries of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, (*PLAIN,)) or (isinstance(value, (tuple, list)) and all(map(is_plain, value)))


@dataclass(frozen=True)
class OwnState:
    """What an optimizer held itself, and what the objects there held."""

    optimizer: Optimizer
    before: Mapping[str, Any]
    inside: tuple[Saved, ...]
    counts: bool = True

    def refuse_changes(self, place: Place) -> None:
        """Raise `UnsupportedStep` naming all of it that the step has changed."""
        now = own_values(self.optimizer)
        names = [
            f"optimizer.{key}"
            for key in dict.fromkeys((*self.before, *now))
            if not is_same_value(self.before.get(key, NOTHING), now.get(key, NOTHING))
            and not self._is_counted(key, now)
        ]
        changed = [name for row in self.inside if not row.is_unchanged for name in row.changed_names()]
        refuse_changed([*names, *changed], place)

    def _is_counted(self, key: str, now: Mapping[str, Any]) -> bool:
        """Whether it is a number, which steps may advance."""
        is_number = key in vars(self.optimizer) and is_countable(now[key])
        return self.counts and is_number and (key not in self.before or is_countable(self.before[key]))


def is_countable(value: object) -> bool:
    """Whether a value is a number that steps may advance, and no truth."""
    return type(value) in (int, float) or is_recorded(value)


def copy_of(value: Any) -> Any:
    """The value; a copy of a container that may be changed."""
    return copy(value) if type(value) in (list, dict) else value


def own_states(optimizer: Optimizer | Optimizers | None) -> Iterator[OwnState]:
    """Those of the optimizers that there are; of several no numbers are advanced."""
    for member in members_of(optimizer):
        held = own_values(member)
        things = [(f"optimizer.{key}", value) for key, value in held.items() if has_state(value)]
        inside = tuple(row for name, value in things for row in save_all(name, value))
        yield OwnState(member, held, inside, counts=member is optimizer)


def is_same_value(then: Any, now: Any) -> bool:
    """Whether a value is what it was: itself, or an equal one of Python's that no step computed."""
    if then is now:
        return True
    is_known = is_plain(then) and type(then) is type(now) and not any(map(is_recorded, tree_flatten(now)[0]))
    return is_known and bool(then == now)


def optimizer_restored(optimizer: Optimizer | Optimizers | None) -> Callable[[], None]:
    """A way back to what an optimizer is now: its attributes, groups, and state."""
    rows = [row for member in members_of(optimizer) for row in save_all("optimizer", member)]

    def restore() -> None:
        for row in rows:
            row.restore()

    return restore

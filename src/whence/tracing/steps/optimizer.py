"""What an optimizer holds, looked at before a step is captured and given back afterwards."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from whence._torch.files import hook_in_words
from whence._torch.observe.attribute_reads import NOTHING, has_attributes, own_attributes
from whence._torch.observe.training_steps import (
    Optimizers,
    all_members_of,
    as_one_optimizer,
    common_state,
    counts_beside,
    is_optimizer,
    members_of,
    optimizer_hooks,
    own_values,
    parameters_of,
    with_common_state,
    with_inner,
)
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.numbers import is_recorded
from whence._torch.subclasses.fully_sharded import name_of_class
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.dependence.snapshots import Saved, save_all, way_back
from whence.errors import Fault, UnsupportedHook, UnsupportedStep, UsageError
from whence.program.arguments.optimizer_arguments import (
    ATTRIBUTES,
    EVERYWHERE,
    NUMBER,
    OWN,
    Setting,
    StateFrame,
    StateHome,
    StatePart,
    Way,
    frame_of,
    is_number,
    is_plain_set,
    is_plain_tensor,
    state_parts,
)
from whence.program.signature import Part
from whence.tracing.steps.enclosed_state import has_state
from whence.tracing.target.subject import StateTensor, Subject

RATE = "lr"
"""The value of a parameter group that schedules change between steps: an input, where that can be."""
_COUNTS = frozenset({"step", "mu_product"})
"""State that is on the CPU, whatever device the parameters are on."""
_BY_KERNELS = ("capturable", "fused")
"""Options with which kernels read it."""
Key = tuple[StateHome, Way]
"""Where a piece of state is kept, and the way to it, or to what is in it."""


@dataclass(frozen=True)
class OptimizerEntry:
    """A piece of the optimizer's state, or something in one: where it is, whose, and what it is."""

    home: StateHome
    way: Way
    path: str
    value: Any
    parameter: StateTensor | None = None
    part: Part | None = None

    @property
    def place(self) -> Key:
        """Where it is."""
        return self.home, self.way

    @property
    def kind(self) -> str:
        """A tensor, a number, or what else it is."""
        return StatePart(self.way, self.path, self.value).kind

    @property
    def is_empty(self) -> bool:
        """Whether it is None in the place of a parameter's state, which a first step puts there."""
        return self.value is None and self.parameter is not None and not self.home.member

    @property
    def is_inside(self) -> bool:
        """Whether it is in a container or an object."""
        return len(self.way) > 1


@dataclass(frozen=True)
class Optimizing:
    """An optimizer and the model's parameters in its groups.

    `state` has the identities of the model's own tensors. `owned` are attributes of the optimizer that steps
    change.
    """

    optimizer: Optimizer | Optimizers | None
    groups: tuple[tuple[StateTensor, ...], ...] = ()
    state: frozenset[int] = frozenset()
    owned: frozenset[str] = frozenset()

    @property
    def parameters(self) -> Iterator[StateTensor]:
        """Group by group."""
        return (row for group in self.groups for row in group)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {str(row.paths[0]): row.tensor for row in self.parameters}

    def pieces(self) -> Iterator[OptimizerEntry]:
        """The state, parameter by parameter, in the optimizer's order of keys, and then its own."""
        seen = set[int]()
        for way, member in self.members():
            state: Any = member.state
            if id(state) not in seen:
                yield from self._in_state(way, member)
            seen.add(id(state))
            home = StateHome(ATTRIBUTES, way)
            for key, value in own_attributes(member).items() if isinstance(member, Optimizer) else ():
                name = ".".join((*way, key))
                if name in self.beside and self.is_owned(name, value):
                    yield OptimizerEntry(home, (key,), home.spelled(key), value)

    def _in_state(self, way: tuple[str, ...], member: Optimizer | Optimizers) -> Iterator[OptimizerEntry]:
        for row in self.parameters:
            home = StateHome(str(row.paths[0]), way)
            for key, value in home.pieces(self.optimizer, {home.owner: row.tensor}).items():
                yield OptimizerEntry(home, (key,), home.spelled(key), value, row)
        home = StateHome(EVERYWHERE, way)
        common = common_state(member) if isinstance(member, Optimizer) else ()
        for key, value in common:
            yield OptimizerEntry(home, (key,), home.spelled(key), value)

    def members(self) -> list[tuple[tuple[str, ...], Optimizer | Optimizers]]:
        """The optimizer and those in it, with the ways there; several are seen as one."""
        if isinstance(self.optimizer, Optimizer):
            return [*with_inner(self.optimizer)]
        return [] if self.optimizer is None else [((), self.optimizer)]

    @property
    def beside(self) -> dict[str, Any]:
        return {} if self.optimizer is None else own_values(self.optimizer)

    def is_owned(self, key: str, value: Any) -> bool:
        """Whether an attribute is state: one that steps change, or that holds tensors which are not the
        model's, or an object or a member of an enumeration, which is not compared as a setting."""
        parts = [] if is_plain(value) and key not in self.owned else [*state_parts(value)]
        return (
            bool(parts)
            and all(part.is_known for part in parts)
            and any(key in self.owned or self._counts(part) for part in parts)
        )

    def _counts(self, part: StatePart) -> bool:
        is_object = part.is_entered and has_attributes(part.value)
        return is_object or isinstance(part.value, Enum) or self._is_input(part.value)

    def _is_input(self, value: Any) -> bool:
        return is_plain_tensor(value) and id(value) not in self.state

    def touched(self) -> Iterator[StateHome]:
        """Where the state of a parameter has been looked for, which makes one, and nothing was put there."""
        states = {id(member.state): (way, member) for way, member in reversed(self.members())}
        for way, member in states.values():
            for row in self.parameters:
                if row.tensor in member.state and not member.state[row.tensor]:
                    yield StateHome(str(row.paths[0]), way)

    def entries(self, advanced: Set[Key] | None = frozenset()) -> list[OptimizerEntry]:
        """All tensors and numbers of the state; of numbers inside of other things the `advanced` ones alone,
        or, with None, all."""
        return [
            row
            for piece in self.pieces()
            for row in _entries_of(piece)
            if self._is_input(row.value)
            or (row.kind == NUMBER and (not row.is_inside or advanced is None or row.place in advanced))
            or (row.is_empty and not row.is_inside)
        ]

    def frames(self) -> dict[Key, StateFrame]:
        """What is neither a tensor nor a number, and what such things are made of."""
        return {
            piece.place: StateFrame(piece.home, piece.way[0], frame_of(piece.value))
            for piece in self.pieces()
            if not (is_plain_tensor(piece.value) or piece.is_empty or is_number(piece.value))
        }

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
        return [
            row
            for row in self._beside()
            if is_plain(row.value) and not self._is_counted(row) and not self.is_owned(row.key, row.value)
        ]

    def _is_counted(self, row: Setting) -> bool:
        return row.key in own_attributes(self.optimizer) and is_number(row.value)

    def _beside(self) -> list[Setting]:
        return [Setting(OWN, key, copy_of(value)) for key, value in self.beside.items()]


def _entries_of(piece: OptimizerEntry) -> Iterator[OptimizerEntry]:
    """A piece of state and all that is in it; of tensors that are made of others each says which it is."""
    wholes: list[StatePart] = []
    for found in state_parts(piece.value, piece.way, piece.path):
        whole = next((each for each in wholes if found.way[: len(each.way)] == each.way), None)
        part = None
        if whole is not None:
            part = Part.of(whole.spelled, whole.value, ".".join(found.way[len(whole.way) :]))
        elif is_composed(found.value):
            wholes.append(found)
        yield OptimizerEntry(piece.home, found.way, found.spelled, found.value, piece.parameter, part)


def optimizing(subject: Subject, optimizer: object) -> Optimizing:
    """Look at an optimizer; raises a `WhenceError` for what cannot be captured."""
    optimizer = as_one_optimizer(optimizer)
    if optimizer is None:
        return Optimizing(None)
    if not isinstance(optimizer, Optimizer | Optimizers) or not is_optimizer(optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}",
            remedy="pass a torch.optim.Optimizer, a list of them, or None where the step updates parameters "
            "itself; of one around another, pass that one (.optimizer), whichever the step calls",
        )
    _refuse_hooks(optimizer)
    _refuse_inner(optimizer)
    rows = {id(row.tensor): row for row in subject.state}
    strangers = [tensor for tensor in parameters_of(optimizer) if id(tensor) not in rows]
    if strangers:
        raise UnsupportedStep(
            f"{len(strangers)} of the optimizer's parameters are not in {name_of_class(subject.roots[0][1])}",
            why="they have no name in the model: "
            + ", ".join(f"a tensor {list(t.shape)}" for t in strangers[:5]),
            remedy="make each an nn.Parameter and pass a model that holds all of them, such as nn.ModuleDict "
            "of what is trained together, and nn.ParameterDict of single ones",
        )
    _refuse_shared(optimizer, rows)
    groups = tuple(tuple(rows[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    found = Optimizing(optimizer, groups, frozenset(rows))
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


def _refuse_inner(optimizer: Optimizer | Optimizers) -> None:
    """Raise `UnsupportedStep` for an optimizer inside of another that has groups of its own."""
    for member in members_of(optimizer):
        groups = {id(group) for group in member.param_groups}
        for way, inner in with_inner(member):
            if any(id(group) not in groups for group in inner.param_groups):
                raise UnsupportedStep(
                    f"optimizer.{'.'.join(way)} has parameter groups of its own",
                    why="what it reads there would be constants of the program",
                    remedy="give both the same groups, as PyTorch's documentation has it for such optimizers",
                )


def _refuse_hooks(optimizer: Optimizer | Optimizers) -> None:
    hooks = optimizer_hooks(optimizer)
    if hooks:
        raise UnsupportedHook(
            f"there are hooks on the optimizer's step: {'; '.join(map(hook_in_words, hooks))}",
            why="what they do in Python would happen once, in the capture, and never again",
            remedy="remove them for the capture, and do in the step what they do",
        )


def _refuse_values(found: Optimizing) -> None:
    faults = strange_state(found)
    faults += [
        Fault(
            f"{setting.path} is a {type(setting.value).__name__}",
            why="only numbers, texts, classes, functions and tensors can be compared with what they are in "
            "later steps",
            remedy="use plain numbers in parameter groups",
        )
        for setting in found.settings()
        if not _is_setting(setting.value)
    ]
    UnsupportedStep.refuse(faults)


def _is_setting(value: object) -> bool:
    """Whether a value of a group can be compared, or is an input."""
    return is_plain(value) or is_plain_set(value) or isinstance(value, (Tensor, type, FunctionType))


def strange_state(found: Optimizing) -> list[Fault]:
    """What is in the state that is neither a tensor nor a number, a constant, or what holds such."""
    return [
        Fault(
            f"the optimizer keeps {part.spelled} as a {type(part.value).__name__}",
            why="a program changes tensors and numbers, and no other values of Python's",
            remedy="use an optimizer that keeps its state in tensors, as those of torch.optim do; or "
            "capture the model with backward=loss and let the optimizer run by itself",
        )
        for piece in found.pieces()
        for part in state_parts(piece.value, piece.way, piece.path)
        if not part.is_known
    ]


def state_there(found: Optimizing) -> dict[str, Tensor]:
    """The tensors of the state that are on the device of their parameter, by path: as optimizers make them,
    and as `load_state_dict` moves them."""
    rows = (row for row in found.entries() if isinstance(row.value, Tensor))
    return {row.path: row.value for row in rows if _follows_parameter(row, found)}


def _follows_parameter(entry: OptimizerEntry, found: Optimizing) -> bool:
    if entry.parameter is None or found.optimizer is None:
        return False
    if entry.way[-1] not in _COUNTS or counts_beside(found.optimizer, entry.parameter.tensor):
        return True
    rows = zip(found.groups, found.optimizer.param_groups, strict=True)
    group = next(group for owned, group in rows if any(row is entry.parameter for row in owned))
    return any(group.get(key) for key in _BY_KERNELS)


def is_plain(value: object) -> bool:
    """Whether a value can be kept and compared: Python's own, members of enumerations, or tuples, lists and
    dictionaries of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, (*PLAIN, Enum)) or (
        isinstance(value, (tuple, list)) and all(map(is_plain, value))
    )


@dataclass(frozen=True)
class OwnState:
    """What an optimizer held itself, and what the objects there held."""

    optimizer: Optimizer
    before: Mapping[str, Any]
    inside: Mapping[str, tuple[Saved, ...]]
    counts: bool = True

    def changes(self) -> Iterator[tuple[str, str]]:
        """What the step has changed: the attribute, and how a person reads it."""
        now = _values_of(self.optimizer, is_part=not self.counts)
        for key in dict.fromkeys((*self.before, *now)):
            is_same = is_same_value(self.before.get(key, NOTHING), now.get(key, NOTHING))
            if not (is_same or self._is_counted(key, now)):
                yield key, f"optimizer.{key}"
        for key, rows in self.inside.items():
            for row in rows:
                yield from () if row.is_unchanged else ((key, name) for name in row.changed_names())

    def _is_counted(self, key: str, now: Mapping[str, Any]) -> bool:
        """Whether it is a number, which steps may advance."""
        is_own = key in vars(self.optimizer) and is_number(now[key])
        return self.counts and is_own and (key not in self.before or is_number(self.before[key]))


def copy_of(value: Any) -> Any:
    """The value; a copy of a container that may be changed."""
    return copy(value) if type(value) in (list, dict, set) else value


def own_states(optimizer: Optimizer | Optimizers | None) -> Iterator[OwnState]:
    """Those of the optimizers that there are; of several no numbers are advanced."""
    for member in members_of(optimizer):
        held = _values_of(member, is_part=member is not optimizer)
        inside = {
            key: tuple(save_all(f"optimizer.{key}", value)) for key, value in held.items() if has_state(value)
        }
        yield OwnState(member, held, inside, counts=member is optimizer)


def _values_of(member: Optimizer, *, is_part: bool) -> dict[str, Any]:
    """What an optimizer holds itself; of several no state is an input that is of no parameter."""
    return with_common_state(member) if is_part else own_values(member)


def is_same_value(then: Any, now: Any) -> bool:
    """Whether a value is what it was: itself, or an equal one of Python's that no step computed."""
    if then is now:
        return True
    if type(then) is not type(now) or not (is_plain(then) or is_plain_set(then)):
        return False
    return not any(map(is_recorded, tree_flatten(now)[0])) and bool(then == now)


def optimizer_restored(optimizer: Optimizer | Optimizers | None) -> Callable[[], None]:
    """A way back to what an optimizer is now: its attributes, groups, and state."""
    members = all_members_of(optimizer)
    return way_back(
        [row for each in members for row in (*save_all("optimizer", each), *_reached_state(each))]
    )


def _reached_state(optimizer: Optimizer) -> Iterator[Saved]:
    """Groups and state, which one that stands around another has from that, and objects in the state."""
    for name in {"param_groups", "state"} - own_attributes(optimizer).keys():
        yield from save_all(f"optimizer.{name}", getattr(optimizer, name))
    for piece in (*optimizer.state.values(), *own_values(optimizer).values()):
        parts = [*takewhile(lambda part: part.is_known, state_parts(piece, spelled="optimizer"))]
        for part in parts:
            if has_attributes(part.value) and part.is_entered:
                yield from save_all(part.spelled, part.value)

"""What a program of a training step needs of an optimizer, and of gradients, beside its inputs."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whence._torch.observe.attribute_reads import NOTHING, has_attributes, own_attributes
from whence._torch.patching import without_patches
from whence._torch.plain_values import PLAIN, same_constant
from whence._torch.sizes.numbers import is_recorded
from whence._torch.subclasses.wrapper_subclasses import is_composed, mesh_of, placements_of, tensors_of
from whence.program.arguments.host_state import HostCall, HostEffect, HostNumber, HostPlace
from whence.program.names import OfClass


@dataclass(frozen=True)
class Initial:
    """What an optimizer's first step puts under a key: a tensor like `like`, whose elements are all `value`.

    Without `like` it is `value` itself.
    """

    value: Any
    like: Tensor | None = None

    def made(self) -> Any:
        """It, in memory of its own."""
        like = self.like
        if like is None:
            return self.value
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return empty.fill_(self.value)


Way = tuple[Any, ...]
"""Keys, places in a row and names of attributes that lead into a piece of state."""
EVERYWHERE = ""
"""In the place of the name of a parameter: state of the optimizer as a whole, under a key of its own."""
ATTRIBUTES = "."
"""In the place of the name of a parameter: attributes of the optimizer."""
NUMBER = "a number"
_ROWS = (list, tuple, deque)
_LEAVES = (Tensor, Enum, nn.Module, Optimizer, type, FunctionType, MethodType, ModuleType)


def is_number(value: object) -> bool:
    """Whether steps may advance a value: a number of Python's, and no truth."""
    return type(value) in (int, float) or is_recorded(value)


def is_plain_tensor(value: object) -> bool:
    """Whether it is a tensor that is an input as it is: one that is made of others is several."""
    return isinstance(value, Tensor) and not is_composed(value)


def is_plain_set(value: object) -> bool:
    """Whether it is a set of constants."""
    return type(value) in (set, frozenset) and all(type(each) in PLAIN for each in value)  # type: ignore[attr-defined]


class StatePart(NamedTuple):
    """A piece of state, or what is inside of one: the way there, how a person reads that, and what it is."""

    way: Way
    spelled: str
    value: Any

    @property
    def kind(self) -> str:
        """What it is made of, in a word."""
        if is_number(self.value):
            return NUMBER
        kind = type(self.value)
        return "a tensor" if is_plain_tensor(self.value) else f"{kind.__module__}.{kind.__qualname__}"

    @property
    def is_known(self) -> bool:
        """Whether it is a tensor, a number, a constant, or holds such things where one can look."""
        value = self.value
        is_leaf = isinstance(value, (Tensor, Enum, type)) or is_number(value) or type(value) in PLAIN
        return is_leaf or self.is_entered or is_plain_set(value)

    @property
    def is_entered(self) -> bool:
        """Whether it holds other things where one can look."""
        return _is_entered(self.value)


def state_parts(
    value: Any, way: Way = (), spelled: str = "", above: tuple[int, ...] = ()
) -> Iterator[StatePart]:
    """A piece of state and all that is in it, what holds others before those."""
    yield StatePart(way, spelled, value)
    if id(value) in above:
        return  # an object that leads back to itself
    for key, spelling, inner in _items_of_state(value):
        yield from state_parts(inner, (*way, key), spelled + spelling, (*above, id(value)))


def _items_of_state(value: Any) -> Iterator[tuple[Any, str, Any]]:
    if not _is_entered(value):
        return
    held = dict(enumerate(value)) if isinstance(value, _ROWS) else _holder(value)
    for key, inner in held.items():
        yield key, f"[{key!r}]" if isinstance(value, (dict, *_ROWS)) else f".{key}", inner


def _is_entered(value: Any) -> bool:
    if is_composed(value):
        return True
    is_leaf = type(value) in PLAIN or isinstance(value, _LEAVES) or is_number(value)
    return isinstance(value, (dict, *_ROWS)) or (has_attributes(value) and not is_leaf)


def inside(value: Any, way: Way) -> Any:
    """What a way leads to; `NOTHING` where it leads nowhere."""
    for key in way:
        held = _holder(value)
        is_there = key in held if isinstance(held, dict) else type(key) is int and key < len(held)
        value = held[key] if is_there else NOTHING
    return value


def put_inside(value: Any, way: Way, new: Any) -> None:
    """Put something else where a way leads to."""
    _holder(inside(value, way[:-1]))[way[-1]] = new


def _holder(value: Any) -> Any:
    if is_composed(value):
        return dict(tensors_of(value))
    return value if isinstance(value, (dict, *_ROWS)) else own_attributes(value)


@dataclass(frozen=True)
class StateHome:
    """Where an optimizer keeps pieces of its state: that of a parameter, by its qualified name, or its own.

    `member` are the attributes that lead to an optimizer which this one stands around.
    """

    owner: str
    member: tuple[str, ...] = ()

    def pieces(self, optimizer: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
        """The pieces by their keys, to be changed; empty where there is nothing yet."""
        held = inside(optimizer, self.member)
        if self.owner == ATTRIBUTES:
            return own_attributes(held)
        state = held.state
        return state if self.owner == EVERYWHERE else state.get(tensors[self.owner], {})  # type: ignore[no-any-return]

    def begun(self, optimizer: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
        """The same, which the optimizer makes where there is nothing yet."""
        if self.owner in (EVERYWHERE, ATTRIBUTES):
            return self.pieces(optimizer, tensors)
        return inside(optimizer, self.member).state[tensors[self.owner]]  # type: ignore[no-any-return]

    @property
    def path(self) -> str:
        """How a person reads it."""
        optimizer = ".".join(("optimizer", *self.member))
        if self.owner == ATTRIBUTES:
            return optimizer
        return f"{optimizer}.state" + (f"[{self.owner!r}]" if self.owner else "")

    def spelled(self, key: Any) -> str:
        """How a person reads a piece."""
        return f"{self.path}.{key}" if self.owner == ATTRIBUTES else f"{self.path}[{key!r}]"


@dataclass(frozen=True)
class StateSlot:
    """The input that holds `optimizer.state[parameter][key]`.

    `parameter` is a qualified name, or another owner that a `StateHome` has. `within` leads on into
    containers and objects, `member` to an optimizer inside of this one. `initial` is what the first step
    makes where there is nothing; None where that is not known.
    """

    input: str
    parameter: str
    key: Any
    initial: Initial | None = None
    within: Way = ()
    member: tuple[str, ...] = ()

    @property
    def home(self) -> StateHome:
        """Where it is kept."""
        return StateHome(self.parameter, self.member)

    @property
    def way(self) -> Way:
        """The way to it from there."""
        return (self.key, *self.within)


@dataclass(frozen=True)
class StateFrame:
    """What a piece of an optimizer's state is made of that is neither a tensor nor a number: containers,
    objects, and the constants in them, which a program does not change.

    `rows` are ways, with what is there, and its value where that is a constant.
    """

    home: StateHome
    key: Any
    rows: tuple[tuple[Way, str, Any], ...]

    def other_parts(self, now: Any, inputs: Set[Way] = frozenset()) -> Iterator[StatePart]:
        """What is another thing now, or there no more; `inputs` are ways to what a program takes in."""
        then = {way: (kind, value) for way, kind, value in self.rows}
        for part in state_parts(now):
            kind, value = then.pop(part.way, ("", None))
            if kind != part.kind or not (part.way in inputs or same_constant(value, constant_of(part))):
                yield part
        yield from (StatePart(way, "".join(f"[{key!r}]" for key in way), NOTHING) for way in then)


def frame_of(value: Any) -> tuple[tuple[Way, str, Any], ...]:
    """The rows of a frame."""
    return tuple((part.way, part.kind, constant_of(part)) for part in state_parts(value))


def constant_of(part: StatePart) -> Any:
    """The value of a constant, the name of a class, or of one in an enumeration; None for tensors, and what
    holds others."""
    if isinstance(part.value, Enum):
        return part.value.name
    if isinstance(part.value, type):
        return f"{part.value.__module__}.{part.value.__qualname__}"
    if is_plain_set(part.value):
        return frozenset(part.value)
    if is_composed(part.value):
        return (tuple(part.value.shape), mesh_of(part.value), placements_of(part.value))
    return part.value if type(part.value) in PLAIN else None


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
    """A value that code reads outside of itself: a constant of the program.

    `path` is how a person reads it. `way` leads from `root` to whatever is there by now. In the place of what
    `is_thing` there may be another one of its class, whose attributes count by themselves.
    """

    path: str
    root: Any
    way: tuple[Callable[[Any], Any], ...]
    value: Any
    is_thing: bool = False

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
    begins, which zeroes it, `without_gradient` those whose `.grad` has to be None when the step begins,
    `cleared` those whose `.grad` is None afterwards, whatever it was. `gradients` are inputs that are
    gradients of before, each with its parameter. `frames` are pieces of the optimizer's state that hold
    others, or are constants. `outside` is what files of releases had here that did not guard it. `empty`
    is state that is None, by parameter and key: a first step puts it there. `touched` is where there is an
    empty state, since the step only looks for some, and whether a first step makes it. `counted` are numbers
    around the step that it advances, and `effects` what else it puts there. `calls` are those of schedules.
    `graph` is the graph that was captured, as long as no pass has made another one of it. A `second` step is
    another program than the first, which only the step itself takes: before that one, guards find what is
    `before`, each with what they guard. `hooked` are parameters that have hooks
    on their gradients, each with these in words: what they do is part of the program. `actors` are the model,
    the optimizer, its methods and schedules where the step finds them; a file does not know them.
    """

    call: Callable[..., Any]
    optimizer: Any = None
    groups: tuple[tuple[str, ...], ...] = ()
    settings: tuple[Setting, ...] = ()
    states: tuple[StateSlot, ...] = ()
    frames: tuple[StateFrame, ...] = ()
    numbers: tuple[GroupSlot, ...] = ()
    cycled: tuple[CycledSlot, ...] = ()
    without_gradient: frozenset[str] = frozenset()
    with_gradient: frozenset[str] = frozenset()
    cleared: frozenset[str] = frozenset()
    gradients: tuple[tuple[str, str], ...] = ()
    outside: tuple[Outside, ...] = ()
    empty: tuple[tuple[str, str], ...] = ()
    counted: tuple[HostNumber, ...] = ()
    effects: tuple[HostEffect, ...] = ()
    calls: tuple[HostCall, ...] = ()
    graph: Any = None
    second: bool = False
    hooked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    touched: tuple[tuple[StateHome, bool], ...] = ()
    actors: tuple[Outside, ...] | None = None
    before: tuple[tuple[str, str], ...] = ()

    @property
    def replaced(self) -> list[Outside]:
        """What the step finds another in the place of, of `actors`, but for what a capture puts there."""
        pairs = ((row, without_patches(row.now())) for row in self.actors or ())
        return [row for row, now in pairs if now is not without_patches(row.value)]

    @property
    def zeroed(self) -> frozenset[str]:
        """Parameters whose `.grad` it fills with zeros first, so that it stays the same tensor."""
        return self.with_gradient - {parameter for _, parameter in self.gradients}

    @property
    def places(self) -> tuple[HostPlace, ...]:
        """Where it puts numbers and other things around it."""
        return (*(row.place for row in self.counted), *(row.place for row in self.effects))

    @property
    def lost(self) -> list[HostPlace]:
        """Those of these places that are nowhere now, or where another of them is, too."""
        rows: dict[tuple[int, Any], tuple[int, Any]] = {}
        missing = []
        for place in self.places:
            now = place.found()
            if now is None or rows.setdefault(now.identity, place.identity) != place.identity:
                missing.append(place)
        return missing

    def as_kept_now(self) -> "Step | None":
        """The step with these places where they are now; None where one of them is nowhere."""
        found = {id(place): now for place in self.places if (now := place.found()) is not None}
        if len(found) < len({*map(id, self.places)}):
            return None
        if all(found[id(place)] is place for place in self.places):
            return self
        if self.lost:
            return None
        counted = tuple(replace(row, place=found[id(row.place)]) for row in self.counted)
        effects = tuple(replace(row, place=found[id(row.place)]) for row in self.effects)
        return replace(self, counted=counted, effects=effects)

    @property
    def optimizer_class(self) -> type:
        """The class of the captured optimizer, which a loaded program has not."""
        return self.optimizer.kind if isinstance(self.optimizer, OfClass) else type(self.optimizer)

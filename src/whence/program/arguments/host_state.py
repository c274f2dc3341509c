"""What a training step keeps in Python beside tensors: counters, lists that grow, the last loss."""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, MappingProxyType
from typing import Any

from whence._torch.observe.attribute_reads import NOTHING, own_attributes
from whence._torch.pytrees import TreeSpec, tree_flatten
from whence.program.calls import Structure
from whence.program.names import Unfound


@dataclass(frozen=True, eq=False)
class HostPlace:
    """Where Python keeps something: under a key of a dictionary or list, or in a closure's variable.

    An attribute lies in the dictionary of its object, in a slot or on a class, a global in that of its file.
    `path` is how a person reads it. What has no `key` is the variable, or the list that is appended to.
    Nothing has an `owner` whose holder is there as long as the step is.
    """

    path: str
    holder: Any
    key: Any = None
    owner: "Owner | None" = None

    def __deepcopy__(self, _known: object) -> "HostPlace":
        """A copy of a program changes what the same step does."""
        return self

    @property
    def identity(self) -> tuple[int, Any]:
        """What is the same for one place, while its holder is alive."""
        return id(self.holder), self.key

    def found(self) -> "HostPlace | None":
        """The same place now: an owner may have been exchanged for another of its kind (a list for an empty
        one, a meter for a new one). None where there is none, or where it is not clear which it is."""
        if self.owner is None:
            return self
        around = [place.found() for place in self.owner.places]
        held = [NOTHING if place is None else place.now() for place in around]
        if all(each is self.owner.thing for each in held):
            return self
        now = held[0]
        if any(each is not now for each in held) or type(now) is not type(self.owner.thing):
            return None
        holder = now if self.holder is self.owner.thing else own_attributes(now)
        moved = replace(self, holder=holder, owner=replace(self.owner, thing=now))
        is_entry = isinstance(holder, list | deque) and self.key is not None
        return None if is_entry and moved.now() is NOTHING else moved

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows where it is: the program comes from a file."""
        return isinstance(self.holder, Unfound)

    @property
    def is_of_module(self) -> bool:
        """Whether it is an attribute of a module."""
        return isinstance(self.holder, dict) and "_parameters" in self.holder

    def is_within(self, holders: Set[int]) -> bool:
        """Whether it is in one of these, or in what one of them holds."""
        around = () if self.owner is None else self.owner.places
        return id(self.holder) in holders or any(place.is_within(holders) for place in around)

    @property
    def _is_slot(self) -> bool:
        return not isinstance(self.holder, dict | list | deque | CellType | MappingProxyType)

    @property
    def _of_holder(self) -> Any:
        """What sets attributes past all code of the user's: of objects, or of classes."""
        return type if isinstance(self.holder, type) else object

    def now(self) -> Any:
        """What is there; `NOTHING` where nothing is."""
        try:
            if isinstance(self.holder, CellType):
                return self.holder.cell_contents
            if isinstance(self.holder, dict):
                return dict.get(self.holder, self.key, NOTHING)
            if isinstance(self.holder, type):
                return self.holder.__dict__[self.key]
            if self._is_slot:
                return object.__getattribute__(self.holder, self.key)
            return self.holder[self.key]
        except (LookupError, TypeError, ValueError, AttributeError):
            return NOTHING

    def way_back(self) -> Callable[[], None]:
        if self.key is None and not isinstance(self.holder, CellType):
            return partial(_refill_held, self.holder, list(self.holder))
        return partial(self._put_back, self.now())

    def _put_back(self, value: Any) -> None:
        if value is not NOTHING:
            self.put(value)
        elif self.now() is NOTHING:
            return
        elif self._is_slot:
            self._of_holder.__delattr__(self.holder, self.key)
        else:
            del self.holder[self.key]

    def put(self, value: Any) -> None:
        """Put something else there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif self._is_slot:
            self._of_holder.__setattr__(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True, eq=False)
class Owner:
    """The object or container that a place is in, and all places where that is kept."""

    thing: Any
    places: tuple[HostPlace, ...]


def _refill_held(held: Any, kept: list[Any]) -> None:
    held.clear()
    held.extend(kept)


@dataclass(frozen=True)
class HostNumber:
    """The input that holds a number or a tensor which steps replace; it must be of one of the `kinds`, named.

    Where a container is replaced, `leaf` says which part of it is meant, and `spec` how the whole is made.
    """

    input: str
    place: HostPlace
    kinds: tuple[str, ...]
    leaf: int | None = None
    spec: TreeSpec | None = None

    @property
    def value(self) -> Any:
        """What is there now; `NOTHING` where the container is made otherwise."""
        held = self.place.now()
        if self.leaf is None:
            return held
        leaves, spec = tree_flatten(held)
        return leaves[self.leaf] if spec == self.spec else NOTHING

    @property
    def fits(self) -> bool:
        """Whether there is such a value now."""
        return type(self.value).__name__ in self.kinds


@dataclass(frozen=True)
class HostEffect:
    """What a step puts somewhere, or appends to a list: tensors and numbers of the program, and constants."""

    place: HostPlace
    value: Structure
    appends: bool = False

    @property
    def left(self) -> Any:
        """What is there once it is done."""
        return self.place.holder[-1] if self.appends else self.place.now()

    def done(self, values: dict[str, Any]) -> None:
        """Do it, with the values of a run by the names of nodes."""
        found = self.value.filled(values)
        if self.appends:
            self.place.holder.append(found)
        else:
            self.place.put(found)


@dataclass(frozen=True, eq=False)
class HostCall:
    """A schedule that the step calls, with what it gives it: runs as it is, when all else is done."""

    path: str
    schedule: Any
    value: Structure

    def __deepcopy__(self, _known: object) -> "HostCall":
        """A copy of a program calls what the same step does."""
        return self

    @property
    def optimizer(self) -> Any:
        """Whose numbers it moves; `NOTHING` where the program comes from a file."""
        return NOTHING if isinstance(self.schedule, Unfound) else self.schedule.optimizer

    def done(self, values: dict[str, Any]) -> None:
        """Call it, with the values of a run by the names of nodes."""
        args, kwargs = self.value.filled(values)
        self.schedule.step(*args, **kwargs)

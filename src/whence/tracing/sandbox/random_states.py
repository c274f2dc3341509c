"""Where torch's generators are while a recording draws nothing.

A program draws on from where the generator is when it is called. A state that the model sets is where the
program's generator is only if it is one that the model has read, with nothing drawn since.
"""

from collections.abc import Callable

from torch import Tensor

from whence._torch.autograd.saved_tensors import packs_what_is_saved
from whence._torch.fakes import FakeTensor
from whence.errors import Fault, Place, SideEffect

_NOWHERE = -1
_REMEDY = "seed, and give states back, outside the captured function; or draw there and pass the numbers in"


class RandomStates:
    """Follows what the model does to torch's generators, and counts what it draws."""

    def __init__(self, name: str, place: Callable[[], Place], distrust: Callable[[str], None]) -> None:
        self._name = name
        self._place = place
        self._distrust = distrust
        self._draws = 0
        self._has_unwound = False
        self._read: dict[int, tuple[object, int]] = {}
        self._elsewhere: dict[str, Place] = {}
        self._mattered: dict[Place, None] = {}
        self._seeds: dict[Place, None] = {}

    def checkpointed(self, *, rewinds: bool) -> None:
        """A checkpoint has begun."""
        self._has_unwound |= not rewinds

    def drew_otherwise(self) -> bool:
        """A random operation is recorded; whether a checkpoint draws other numbers there in the backward."""
        self.drew()
        return self._has_unwound and packs_what_is_saved()

    def drew(self) -> None:
        """Something is drawn that moves the generators of the program on."""
        self._draws += 1
        self._mattered |= dict.fromkeys(self._elsewhere.values())

    def state_read(self, state: object) -> None:
        """The model has read a state: it is where the generators of the program are now."""
        self._distrust("the model reads the state of the random number generator")
        self._read[id(state)] = state, _NOWHERE if self._elsewhere else self._draws

    def state_set(self, device: str, state: object) -> None:
        """The model sets the state of a generator: None for one that it has not read."""
        if isinstance(state, FakeTensor):
            raise SideEffect.of([self._set(self._place())])
        self._distrust("the model sets the state of the random number generator")
        _, draws = self._read.get(id(state), (None, _NOWHERE))
        if draws == self._draws:
            self._elsewhere.pop(device, None)
        else:
            self._elsewhere[device] = self._place()

    def seed_read(self) -> None:
        """The model asks for a seed."""
        self._seeds[self._place()] = None

    def refuse_use(self, tensor: Tensor) -> None:
        """Raise `SideEffect` for a state that the model computes with."""
        if id(tensor) in self._read:
            raise SideEffect.of([self._used("computes with the state", self._place())])

    def faults(self) -> list[Fault]:
        """What makes the program's numbers, or its generators afterwards, others than eager's."""
        places = dict.fromkeys([*self._mattered, *self._elsewhere.values()])
        return [*map(self._set, places), *(self._used("asks for the seed", place) for place in self._seeds)]

    def _set(self, place: Place) -> Fault:
        return Fault(
            f"{self._name} sets the state of the random number generator while it runs",
            where=place,
            why="a program draws on from where the generator is when it is called, and eager draws other "
            "numbers from there, or leaves the generator in another state",
            remedy=_REMEDY,
        )

    def _used(self, what: str, place: Place) -> Fault:
        return Fault(
            f"{self._name} {what} of the random number generator",
            where=place,
            why="it would be a constant of the program, the same in every run",
            remedy=_REMEDY,
        )

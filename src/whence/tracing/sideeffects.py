"""What a model does on the side while it runs, and a graph cannot repeat: refused."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from whence._torch.generators import (
    Kind,
    is_only_thread,
    numpy_state,
    observed_generators,
    set_numpy_state,
)
from whence._torch.tensors import generator_state, set_generator_state, writes_to
from whence.errors import Fault, SideEffect
from whence.tracing.session import Session
from whence.tracing.subject import Subject


class SideEffects:
    """Gradients and random generators as they were, and what this thread has done to them since."""

    def __init__(self, session: Session) -> None:
        self._subject = subject = session.subject
        self._session = session
        self._read: list[tuple[Tensor, int]] = []
        self._rewound = False
        self._gradients = [(row, row.tensor.grad, _writes(row.tensor.grad)) for row in subject.state]
        self._generators = {kind: read() for kind, read in _GENERATORS.items()}
        self._moved: dict[Kind, object] = {}
        self._was_alone = is_only_thread()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise `SideEffect` after the block for all that it did, at once."""
        with observed_generators(self._note, self._note_state, self._give_back):
            yield
        written = [
            str(row.paths[0])
            for row, gradient, writes in ([] if self._session.fills_gradients else self._gradients)
            if row.tensor.grad is not gradient or _writes(gradient) != writes
        ]
        faults = [_wrote_gradients(self._subject, written)] if written else []
        faults += [_FAULTS[kind](self._subject) for kind in self._moved_generators()]
        faults += [_rewound(self._subject)] if self._rewound else []
        if faults:
            raise SideEffect.of(faults)

    def undo(self) -> None:
        """Give gradients back, and generators that this thread has moved."""
        for row, gradient, _ in self._gradients:
            if row.tensor.grad is not gradient:
                row.tensor.grad = gradient
        for kind, before in self._moved_generators().items():
            _WRITERS[kind](before)

    def _note(self, kind: Kind) -> None:
        """Something is about to move a generator; what other threads drew until now stays drawn."""
        self._moved.setdefault(kind, _GENERATORS[kind]())

    def _note_state(self, state: Tensor) -> None:
        """Somebody reads the state of torch's generator, to give it back."""
        self._session.replayer.distrust("the model reads the state of the random number generator")
        self._read.append((state, len(self._session.notes.draws)))

    def _give_back(self, state: Tensor) -> None:
        """What is drawn in between eager draws again; of a state from elsewhere, all is."""
        drawn = next((drawn for known, drawn in self._read if known is state), 0)
        self._rewound |= drawn < len(self._session.notes.draws)

    def _moved_generators(self) -> dict[Kind, object]:
        """What this thread has moved, with the states before.

        Where no other thread runs, whatever has moved was moved by this one, seen or not.
        """
        seen = self._moved | (self._generators if self._was_alone and is_only_thread() else {})
        return {
            kind: seen[kind] for kind, read in _GENERATORS.items() if kind in seen and read() != seen[kind]
        }


def _writes(gradient: Tensor | None) -> int:
    return 0 if gradient is None else writes_to(gradient)


def _wrote_gradients(subject: Subject, touched: Sequence[str]) -> Fault:
    return Fault(
        f"{subject.name} writes the gradients of {', '.join(touched)} while it runs",
        where=subject.place,
        why="a backward() inside the model, or in a custom autograd function, fills .grad on the side",
        remedy="use torch.autograd.grad inside the model, which returns gradients as values",
    )


def _drew(source: str, subject: Subject) -> Fault:
    return Fault(
        f"{subject.name} draws from {source} while it runs",
        where=subject.place,
        why="the number would be a constant of the program, the same in every run",
        remedy="draw it outside and pass it in, or use torch's generator",
    )


def _set_generator(subject: Subject) -> Fault:
    return Fault(
        f"{subject.name} sets the state of the random number generator while it runs",
        where=subject.place,
        why="fake tensors draw no numbers, so torch.manual_seed or set_rng_state has changed it",
        remedy="seed outside the captured function",
    )


def _rewound(subject: Subject) -> Fault:
    return Fault(
        f"{subject.name} gives the random number generator a state back from before numbers were drawn",
        where=subject.place,
        why="eager draws the same numbers again afterwards (fork_rng, set_rng_state), and a program new ones",
        remedy="draw those numbers outside and pass them in, or let the generator move on",
    )


def warn_about_kept(session: Session) -> None:
    """Warn of tensors of a finished run that somebody holds: a global, a cache, a hook that collects."""
    kept = session.kept_outside()
    if kept:
        warnings.warn(
            f"an object, a global or a cache holds tensors of the capture: {', '.join(kept)}. They "
            "are shapes without numbers, and a program does not repeat that: clear the global, cache or list "
            "that holds them, or return them",
            stacklevel=4,
        )


_GENERATORS: dict[Kind, Callable[[], Any]] = {
    "python": random.getstate,
    "numpy": numpy_state,
    "torch": generator_state,
}
_WRITERS: dict[Kind, Callable[[Any], None]] = {
    "python": random.setstate,
    "numpy": set_numpy_state,
    "torch": set_generator_state,
}
_FAULTS: dict[Kind, Callable[[Subject], Fault]] = {
    "python": partial(_drew, "Python's random module"),
    "numpy": partial(_drew, "NumPy's default generator"),
    "torch": _set_generator,
}

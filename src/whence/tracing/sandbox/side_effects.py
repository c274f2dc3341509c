"""What a model does on the side while it runs, and a graph cannot repeat: refused."""

import gc
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from whence._torch.observe.generators import (
    Kind,
    is_only_thread,
    numpy_state,
    observed_generators,
    set_numpy_state,
)
from whence._torch.tensors import generator_state, set_generator_state, writes_to
from whence.errors import Fault, LostState, SideEffect
from whence.tracing.recording.session import Session
from whence.tracing.replay.objections import Doubt
from whence.tracing.sandbox.leaks import take_out
from whence.tracing.target.subject import Subject


class SideEffects:
    """Gradients and random generators as they were, and what this thread has done to them since.

    What `fills_gradients` may do so.
    """

    def __init__(self, session: Session) -> None:
        self._subject = session.run.subject
        self._sources = session.run.reads.reachable.sources
        self._random_states = session.run.random_states
        self._fills_gradients = session.fills_gradients
        self._gradients = [(row, row.tensor.grad, _writes(row.tensor.grad)) for row in self._subject.state]
        self._generators = {kind: read() for kind, read in _GENERATORS.items()}
        self._moved: dict[Kind, object] = {}
        self._was_alone = is_only_thread()
        self._literals = session.log.literals

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise `SideEffect` after the block for all that it did, at once."""
        with (
            observed_generators(self._note, self._random_states) as pair,
            self._sources.watched(pair, self._set_held),
            self._sources.threads_refused(self._literals),
        ):
            yield
        written = [
            str(row.paths[0])
            for row, gradient, writes in ([] if self._fills_gradients else self._gradients)
            if row.tensor.grad is not gradient or _writes(gradient) != writes
        ]
        faults = [_wrote_gradients(self._subject, written)] if written else []
        states = self._random_states.faults()
        moved = [kind for kind in self._moved_generators() if not states or kind != "torch"]
        faults += [*(_FAULTS[kind](self._subject) for kind in moved), *states, *self._sources.faults()]
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

    def _set_held(self) -> None:
        """The model is about to set torch's generator through an object of its own, to whatever state."""
        self._note("torch")
        self._random_states.state_set("cpu", None)

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


def take_out_kept(session: Session) -> None:
    """Take tensors of a finished run from whoever holds them, and warn; raises `LostState`."""
    kept = _kept_outside(session)
    if not kept:
        return
    names, alive = ", ".join(kept), [ref(tensor) for tensor in kept.values()]
    holders = take_out(list(kept.values()))
    kept.clear()
    gc.collect()
    if any(tensor() is not None for tensor in alive):
        raise _kept(session.run.subject, names, holders)
    warnings.warn(
        f"an object, a global or a cache kept tensors of the capture: {names}; they are removed. "
        "A captured program does not repeat that: return them; where they fill a cache, run the model "
        "before the capture",
        stacklevel=4,
    )


def _kept_outside(session: Session) -> dict[str, Tensor]:
    """The results that somebody holds although the run is over, by their operations and lines."""
    replayed, recorder, log = session.forget(), session.recorder, session.log
    _collect_while(lambda: not log.marks.keys().isdisjoint(recorder.results_alive()))
    alive = recorder.results_alive()
    for node in alive:
        if node in replayed:
            raise Doubt(replayed[node], "somebody keeps what it computes")
    held = [node for node in log.order if node in alive]
    return {f"{node.name} ({log.marks[node].source})": alive[node] for node in held}


def _collect_while(held: Callable[[], bool]) -> None:
    """Collect what hooks and custom functions leave in cycles: all that was made while Python's collector
    waited is young, and looking through the rest of the process may take seconds."""
    for generation in range(3):
        if not held():
            return
        gc.collect(generation)


def _kept(subject: Subject, names: str, holders: Sequence[str]) -> LostState:
    by = " and ".join(f"a {kind}" for kind in holders) or "something"
    return LostState(
        f"{by} that nobody can look into keeps tensors of the capture: {names}",
        where=subject.place,
        why="they are shapes without numbers, and whoever finds them there fails, also the model itself",
        remedy="make anew what holds these, and run the model once on the example inputs before the capture, "
        "so that nothing is left to be kept",
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

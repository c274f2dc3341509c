"""What a model does on the side while it runs, and a graph cannot repeat: refused."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

from torch import Tensor

from whence._torch.autograd.mode_questions import Pair, answered_questions
from whence._torch.autograd.nodes import overwritten, saves_its_result
from whence._torch.deciding.decider import Decider
from whence._torch.higher_order.function_graphs import functions_unwatched
from whence._torch.observe.generators import (
    READERS,
    Kind,
    is_only_thread,
    observed_generators,
    set_states,
    states,
)
from whence._torch.sizes.drawn_numbers import are_whole_or_one, draw_of
from whence._torch.tensors import writes_to
from whence.errors import DataDependent, Fault, LostState, Place, SideEffect
from whence.tracing.objections import Doubt
from whence.tracing.recording.session import Session
from whence.tracing.sandbox.leftovers import take_out
from whence.tracing.target.subject import Subject


class SideEffects:
    """Gradients and random generators as they were, and what this thread has done to them since.

    What `fills_gradients` may do so. Where the example decides, a refusal does not say to let it.
    """

    def __init__(self, session: Session, *, decides: bool) -> None:
        self._decides = decides
        self._subject = session.run.subject
        self._sources = session.run.reads.reachable.sources
        self._random_states = session.run.random_states
        self._fills_gradients = session.fills_gradients
        self._gradients = [
            (row, row.tensor.grad, _write_count(row.tensor.grad)) for row in self._subject.state
        ]
        self._generators = states()
        self._moved: dict[Kind, object] = {}
        self._recorded: dict[Kind, object] = {}
        self._places: dict[Kind, Place] = {}
        self._held_by_none = set[Kind]()
        """Generators of which something was drawn that no program can hold, whoever decides."""
        self._session = session
        self._was_alone = is_only_thread()
        self._literals = session.log.literals

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise `SideEffect` after the block for all that it did, at once; also where a decision ends it that
        the example could take, and what was drawn stands against that."""
        with (
            observed_generators(self._note, self._random_states, self._drawing) as pairs,
            self._questions_answered() as answers,
            self._sources.watched([*pairs, *answers], self._set_held, self._read),
            self._sources.threads_refused(self._literals),
        ):
            try:
                yield
            except DataDependent as error:
                if self._held_by_none:
                    raise SideEffect.of(map(self._fault, sorted(self._held_by_none))) from error
                raise
        written = [
            str(row.paths[0])
            for row, gradient, writes in ([] if self._fills_gradients else self._gradients)
            if row.tensor.grad is not gradient or _write_count(gradient) != writes
        ]
        faults = [_wrote_gradients(self._subject, written)] if written else []
        set_by_model = self._random_states.faults()
        moved = [kind for kind in self._moved_unrecorded() if not set_by_model or kind != "torch"]
        if self._sources.has_checked and "python" in self._recorded:
            moved.append("python")  # in eager mode what checks types draws between
        faults += [*(self._fault(kind) for kind in moved), *set_by_model, *self._sources.faults()]
        SideEffect.refuse(faults)

    def _questions_answered(self) -> AbstractContextManager[Sequence[Pair]]:
        session = self._session
        is_model_asking = session.run.places.finder.is_model_asking
        return answered_questions(
            session.recorder.listener.model.mode_asked, is_model_asking, functions_unwatched
        )

    def undo(self) -> None:
        """Give gradients back, and generators that this thread has moved."""
        for row, gradient, _ in self._gradients:
            if row.tensor.grad is not gradient:
                row.tensor.grad = gradient
        set_states(self._moved_generators(states()))

    def _note(self, kind: Kind) -> None:
        """Something is about to move a generator; what other threads drew until now stays drawn."""
        if kind not in self._moved:
            self._moved[kind] = READERS[kind]()
            self._places[kind] = self._session.run.places.here()

    def _drawing(
        self,
        kind: Kind,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The model moves a generator of Python's or NumPy's; where the example decides that is recorded."""
        was_recorded = READERS[kind]() == self._recorded.get(kind, self._generators[kind])
        self._note(kind)
        decider = self._decider() if was_recorded else None
        draw = draw_of(f"{_MODULES[kind]}.{name}", args, kwargs)
        found = function(*args, **kwargs) if draw is None else draw.by(function)
        if draw is None or not are_whole_or_one(found):
            self._held_by_none.add(kind)
            return found if draw is None else draw.finished(found)
        if decider is None:
            return draw.finished(found)
        self._recorded[kind] = READERS[kind]()
        return draw.finished(decider.drawn(draw, found))

    def _read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a clock shows, where the example decides; None for what is no clock."""
        decider, draw = self._decider(), draw_of(name, args, kwargs)
        return None if decider is None or draw is None else decider.drawn(draw, draw.by(function))

    def _decider(self) -> Decider | None:
        """Who writes down what is drawn; nobody inside functions that an operator runs."""
        recorder = self._session.recorder
        return recorder.decider if self._session.branches.recorder is recorder else None

    def _set_held(self) -> None:
        """The model is about to set torch's generator through an object of its own, to whatever state."""
        self._note("torch")
        self._random_states.state_set("cpu", None)

    def _fault(self, kind: Kind) -> Fault:
        place = self._places.get(kind, self._subject.place)
        if kind == "torch":
            return _set_generator(self._subject, place)
        return _drew(_SOURCES[kind], self._subject, place, decides=self._decides or bool(self._held_by_none))

    def _moved_generators(self, now: Mapping[Kind, object]) -> dict[Kind, object]:
        """What this thread has moved to where it is now, with the states before.

        Where no other thread runs, whatever has moved was moved by this one, seen or not.
        """
        seen = self._moved | (self._generators if self._was_alone and is_only_thread() else {})
        return {kind: before for kind, before in seen.items() if now[kind] != before}

    def _moved_unrecorded(self) -> list[Kind]:
        """The generators that are elsewhere than what was recorded leaves them."""
        now = states()
        moved = self._moved_generators(now)
        return [kind for kind in moved if kind not in self._recorded or now[kind] != self._recorded[kind]]


_MODULES: dict[Kind, str] = {"python": "random", "numpy": "numpy.random"}
_SOURCES: dict[Kind, str] = {"python": "Python's random module", "numpy": "NumPy's default generator"}
_LET_DECIDE = (
    "or, where it is a number of up to 64 bits, and no default argument draws it, let the example decide "
    'with decide="example", and every run draws as eager does, and is held to the decisions'
)
_DECIDED_ALREADY = (
    'with decide="example" a program draws a number of up to 64 bits, or places in a sequence, where no '
    "default argument draws it, but no array, and it sets no seed"
)


def _write_count(gradient: Tensor | None) -> int:
    return 0 if gradient is None else writes_to(gradient)


def _wrote_gradients(subject: Subject, touched: Sequence[str]) -> Fault:
    return Fault(
        f"{subject.name} writes the gradients of {', '.join(touched)} while it runs",
        where=subject.place,
        why="a backward() inside the model, or in a custom autograd function, fills .grad on the side",
        remedy="use torch.autograd.grad inside the model, which returns gradients as values",
    )


def _drew(source: str, subject: Subject, where: Place, *, decides: bool) -> Fault:
    return Fault(
        f"{subject.name} draws from {source} while it runs",
        where=where,
        why="the number would be a constant of the program, the same in every run",
        remedy=f"draw it outside and pass it in; {_DECIDED_ALREADY if decides else _LET_DECIDE}",
    )


def _set_generator(subject: Subject, where: Place) -> Fault:
    return Fault(
        f"{subject.name} sets the state of the random number generator while it runs",
        where=where,
        why="fake tensors draw no numbers, so torch.manual_seed or set_rng_state has changed it",
        remedy="seed outside the captured function",
    )


def take_out_kept(session: Session) -> None:
    """Take tensors of a finished run from whoever holds them, and warn; raises `LostState`."""
    kept = _kept_outside(session)
    if not kept:
        return
    names, tensors = ", ".join(kept), list(kept.values())
    alive = [ref(tensor) for tensor in tensors]
    kept.clear()
    holders = take_out(tensors)
    tensors.clear()
    gc.collect()
    if left := [tensor for each in alive if (tensor := each()) is not None]:
        if holders or not _kept_by_autograd(left, has_packed=session.run.watch.has_packed):
            raise _keeps_tensors(session.run.subject, names, holders)
        return
    warnings.warn(
        f"an object, a global or a cache kept tensors of the capture: {names}; they are removed. "
        "A captured program does not repeat that: return them; where they fill a cache, run the model "
        "before the capture",
        stacklevel=4,
    )


def _kept_by_autograd(tensors: Sequence[Tensor], *, has_packed: bool) -> bool:
    """Whether they are in a circle that nobody finds: of a view whose base is written later, or of a result
    that a hook on saved tensors gives back as it is (`save_on_cpu`, on a CPU)."""
    return overwritten(tensors, ()) is not None or (has_packed and any(map(saves_its_result, tensors)))


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


def _keeps_tensors(subject: Subject, names: str, holders: Sequence[str]) -> LostState:
    by = " and ".join(f"a {kind}" for kind in holders) or "something"
    return LostState(
        f"{by} that nobody can look into keeps tensors of the capture: {names}",
        where=subject.place,
        why="they are shapes without numbers, and whoever finds them there fails, also the model itself",
        remedy="make anew what holds these, and run the model once on the example inputs before the capture, "
        "so that nothing is left to be kept",
    )

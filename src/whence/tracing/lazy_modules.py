"""Lazy modules get their parameters before anything is recorded.

The model runs once on fake tensors, and nothing of that run is kept; but where a lazy module is called, its
`initialize_parameters` runs outside the fake world, so its parameters are real, and drawn from the real
generator in the order of the calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from whence._torch.autograd.switches import modes_restored
from whence._torch.observe.module_calls import ObservedCall
from whence._torch.patching import patches_undone
from whence._torch.subclasses.lazy_modules import (
    initialised_for_real,
    is_waiting,
    lazy_again,
    uninitialised,
    without_numbers,
)
from whence._torch.tensors import clear_autocast_cache, tensors_restored
from whence.dependence.snapshots import way_back
from whence.errors import DataDependent
from whence.provenance import ModulePath
from whence.tracing.recording.run import rehearse
from whence.tracing.recording.session import Session
from whence.tracing.sandbox.module_snapshot import kept_of
from whence.tracing.sandbox.undo import Interrupts, Undoing, WayBack
from whence.tracing.target.example import Example
from whence.tracing.target.subject import StateTensor, Subject, subject_of


def materialised(subject: Subject, example: Example, interrupts: Interrupts) -> Subject:
    """`subject` with its lazy modules initialised, as its first call would do it."""
    lazy = [module for _, module in subject.named_modules() if is_waiting(module) or uninitialised(module)]
    if not lazy:
        return subject
    waiting = {id(module) for module in lazy}
    settled = [(path, module) for path, module in subject.named_modules() if id(module) not in waiting]
    state = [row for row in subject.state if row.is_initialised]
    undoing = Undoing()
    initialisation = _Initialisation(subject, undoing, {id(module) for _, module in settled})
    undoing.later(
        lambda: clear_autocast_cache(forced=not undoing.finished),
        way_back(kept_of((*settled, *subject.named_wrappers()))),
        *(initialisation.unless_initialised(module) for module in lazy),
        tensors_restored(row.tensor for row in state),
        patches_undone(),
        modes_restored(),
    )
    clear_autocast_cache()
    undoing.around(lambda: initialisation.run(example, state, interrupts))
    return replace(subject_of(subject.call), wrappers=subject.wrappers)


class _Initialisation:
    """The rehearsal in which lazy modules are initialised; each is then kept as it is."""

    def __init__(self, subject: Subject, undoing: Undoing, settled: set[int]) -> None:
        self._subject = subject
        self._undoing = undoing
        self._settled = settled
        self._session: Session | None = None

    def run(self, example: Example, state: list[StateTensor], interrupts: Interrupts) -> None:
        rehearse(self._subject, example, state, self._observing, interrupts)

    def unless_initialised(self, module: nn.Module) -> WayBack:
        """A way back for a lazy module, given up once it is initialised."""
        restore = lazy_again(module)

        def undo() -> None:
            if id(module) not in self._settled:
                restore()

        return undo

    def _observing(self, session: Session) -> "_Initialisation":
        self._session = session
        return self

    @contextmanager
    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        session = self._running()
        with session.calls.called(module, args, kwargs) as call:
            if not is_waiting(module):
                yield call
                return
            known = {id(t) for t in (*module.parameters(), *module.buffers())} - _unready(module)
            with initialised_for_real(module, lambda done: self._initialised(done, known)):
                yield call

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self._running().calls.accessed(parent, name, child)

    def _running(self) -> Session:
        if self._session is None:
            raise RuntimeError("a module was called before the rehearsal began")
        return self._session

    def _initialised(self, module: nn.Module, known: set[int]) -> None:
        """From here on the run's changes of the module, and of those it made, are undone."""
        place = self._running().run.places.here()
        if names := without_numbers(module, known):
            raise DataDependent(
                f"{', '.join(names)} of {type(module).__name__} depend on the values of the example",
                where=place,
                why="initialize_parameters is given tensors of the right shapes without values: the model's "
                "real computation is not run",
                remedy="call the model once on the example inputs before the capture",
            )
        new = [(ModulePath.parse(name), inner) for name, inner in module.named_modules()]
        unsettled = [
            (path, inner) for path, inner in new if id(inner) not in self._settled and not is_waiting(inner)
        ]
        self._undoing.later(way_back(kept_of(unsettled)))
        self._settled |= {id(inner) for _, inner in unsettled}


def _unready(module: nn.Module) -> set[int]:
    inner = [(held, uninitialised(held)) for held in module.modules()]
    return {id(getattr(held, name)) for held, names in inner for name in names}

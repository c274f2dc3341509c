"""What a model does on the side while it runs, and a graph cannot repeat: refused."""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from whence._torch.tensors import generator_state
from whence.errors import Fault, SideEffect
from whence.tracing.session import Session
from whence.tracing.subject import StateTensor, Subject


@contextmanager
def refuse_side_effects(subject: Subject, state: Sequence[StateTensor]) -> Iterator[None]:
    """Raise `SideEffect` after the block for written gradients and touched random generators, all at once."""
    torch_state, python_state = generator_state(), random.getstate()
    gradients = [row.tensor.grad for row in state]
    try:
        yield
    finally:
        touched = _gradients_restored(state, gradients)
    faults = [_wrote_gradients(subject, touched)] if touched else []
    faults += [_drew_in_python(subject)] if random.getstate() != python_state else []
    faults += [_set_generator(subject)] if generator_state() != torch_state else []
    if faults:
        raise SideEffect.of(faults)


def _wrote_gradients(subject: Subject, touched: Sequence[str]) -> Fault:
    return Fault(
        f"{subject.name} writes the gradients of {', '.join(touched)} while it runs",
        where=subject.place,
        why="a backward() inside the model, or in a custom autograd function, fills .grad on the side",
        remedy="use torch.autograd.grad inside the model, which returns gradients as values",
    )


def _drew_in_python(subject: Subject) -> Fault:
    return Fault(
        f"{subject.name} draws from Python's random module while it runs",
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


def _gradients_restored(state: Sequence[StateTensor], before: Sequence[Tensor | None]) -> list[str]:
    """Give every tensor its gradient back; returns the names of those that had another one."""
    touched = []
    for row, gradient in zip(state, before, strict=True):
        if row.tensor.grad is not gradient:
            row.tensor.grad = gradient
            touched.append(str(row.paths[0]))
    return touched

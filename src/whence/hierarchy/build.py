"""A program becomes modules: plan, check, emit."""

from whence.hierarchy.check import check
from whence.hierarchy.emit import emit
from whence.hierarchy.planning import plan
from whence.hierarchy.tree import Tree
from whence.program import Program


def unflatten(program: Program, *, copy: bool = False) -> Tree:
    """The module tree of a program, runnable and trainable."""
    return _emitted(program, flat=False, copy=copy)


def flat_module(program: Program, *, copy: bool = False) -> Tree:
    """The program as one module with one graph, holding the original's state under its own names."""
    module = _emitted(program, flat=False, copy=copy)
    flat = _emitted(program, flat=True, copy=False)
    (module.watched, *_), module.calls = module.calls, flat.calls
    return module


def _emitted(program: Program, *, flat: bool, copy: bool) -> Tree:
    planned = plan(program, flat=flat)
    check(planned)
    return emit(planned, copy=copy)

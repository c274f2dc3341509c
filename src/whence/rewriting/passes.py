"""Passes: what any graph of a program may be rewritten by, each a value that can be printed and compared."""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import fx

from whence.errors import UsageError
from whence.program import FlatProgram
from whence.program.arguments.variants import with_variants
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed
from whence.rewriting.track import Edit, track

P = TypeVar("P", bound=FlatProgram)
_MOST = 200
"""Letters of a pass in the history: one may hold a table of hundreds of functions."""


@runtime_checkable
class Pass(Protocol):
    """Rewrites the graph of an edit in place; a frozen dataclass, best of all.

    Before and after it the program is valid: what a pass makes is checked, and every new node must come from
    somewhere (copied metadata, a replacement that was seen, or `edit.replaced` and `edit.split`).
    """

    @property
    def name(self) -> str:
        """What origins call the pass."""

    def rewrite(self, edit: Edit) -> None:
        """Rewrite `edit.graph`, or assign another `edit.graph_module`."""


GraphPass = Callable[[fx.GraphModule], Any]
"""A pass as PyTorch has them: takes a graph module, and returns None, another one, or a `PassResult`."""


@dataclass(frozen=True)
class FunctionPass:
    """A function over graph modules as a pass."""

    function: GraphPass

    @property
    def name(self) -> str:
        """The name of the function, or of its class."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def rewrite(self, edit: Edit) -> None:
        """Call it; what it returns may be nothing, a graph module, or a result that holds one."""
        returned = self.function(edit.graph_module)
        found = getattr(returned, "graph_module", returned)
        if found is not None:
            edit.graph_module = found


def as_pass(pass_: Pass | GraphPass) -> Pass:
    """A pass, or a function over graph modules as one; raises `UsageError` for what is neither."""
    if isinstance(pass_, type) or not (isinstance(pass_, Pass) or callable(pass_)):
        given = f"the class {pass_.__name__}" if isinstance(pass_, type) else type(pass_).__name__
        raise UsageError(
            f"expected a pass, got {given}",
            remedy="give an object with `name` and `rewrite(edit)`, or a function over a graph module",
        )
    return pass_ if isinstance(pass_, Pass) else FunctionPass(pass_)


def apply(program: P, pass_: Pass | GraphPass) -> P:
    """The program that a pass makes of another, which stays as it is; its variants go through it, too.

    Raises `UsageError` for what is no pass, `LostProvenance` as `track` does.
    """
    chosen = as_pass(pass_)
    return with_variants(program, lambda each: _applied(each, chosen, is_given=chosen is pass_))


def _applied(program: P, chosen: Pass, *, is_given: bool) -> P:
    options = _in_short(repr(chosen)) if is_dataclass(chosen) and is_given else ""
    try:
        with track(program, chosen.name, options) as edit:
            chosen.rewrite(edit)
    except OF_OPERATIONS as error:
        refuse_failed(program, error)
        raise
    return edit.program


def _in_short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"

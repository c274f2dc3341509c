"""Find inputs and outputs by any name a person would use for them."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from whence.errors import SelectionError
from whence.program.signature import Input, Output, Signature

Row = TypeVar("Row", Input, Output)


def find_input(signature: Signature, name: str) -> Input:
    """By placeholder name, fully qualified name, alias or pytree path; raises `SelectionError`.

    The name of a tensor that is made of several finds its part where there is only one, and else names them.
    """
    rows = (*signature.attributes, *signature.inputs)
    ways = (lambda row: (row.name,), lambda row: (row.path, *row.aliases), _whole)
    known = [text for row in rows for text in (row.name, row.path, *row.aliases)]
    return _only("input", name, _called(name, rows, ways), known)


def _whole(row: Input | Output) -> tuple[str, ...]:
    return () if row.part is None else (row.part.whole,)


def find_output(signature: Signature, name: str) -> Output:
    """By name, path or node, or through the input it belongs to; raises `SelectionError`."""
    rows = signature.outputs
    ways = (lambda row: (row.name,), lambda row: (row.path,), lambda row: (row.node,), _whole)
    owner = next((row.name for row in signature.inputs if name in (row.name, row.path, *row.aliases)), None)
    belonging = [row for row in rows if owner is not None and row.of == owner]
    known = [text for row in rows for text in (row.name, row.path)]
    return _only("output", name, _called(name, rows, ways) or belonging, known)


def _called(name: str, rows: Sequence[Row], ways: Iterable[Callable[[Row], Iterable[Any]]]) -> list[Row]:
    """What is called so in the first of these ways in which anything is."""
    return next(filter(None, ([row for row in rows if name in way(row)] for way in ways)), [])


def _only(what: str, name: str, found: Sequence[Row], known: Sequence[str]) -> Row:
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(row.name for row in found)
        raise SelectionError(f"{name!r} fits several: {names}", remedy="use one of these names")
    close = get_close_matches(name, known, n=3)
    remedy = (
        f"did you mean {', '.join(close)}?"
        if close
        else f"the {what}s are listed by print(program.signature)"
    )
    raise SelectionError(f"no {what} is called {name!r}", remedy=remedy)

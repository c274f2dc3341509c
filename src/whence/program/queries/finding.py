"""Find inputs and outputs by any name a person would use for them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

from whence.errors import SelectionError
from whence.program.signature import Input, Output, Signature

Row = TypeVar("Row", Input, Output)


def find_input(signature: Signature, name: str) -> Input:
    """By placeholder name, fully qualified name, alias or pytree path; raises `SelectionError`.

    The name of a tensor that is made of several finds its part where there is only one, and else names them.
    """
    rows = (*signature.attributes, *signature.inputs)
    for spellings in (lambda row: (row.name,), lambda row: (row.path, *row.aliases), _whole):
        found = [row for row in rows if name in spellings(row)]
        if found:
            return _only(found, name, [row.name for row in found])
    raise _unknown("input", name, [text for row in rows for text in (row.name, row.path, *row.aliases)])


def _whole(row: Input | Output) -> tuple[str, ...]:
    """The tensor that a row is a part of."""
    return () if row.part is None else (row.part.whole,)


def find_output(signature: Signature, name: str) -> Output:
    """By name, path or node, or through the input it belongs to; raises `SelectionError`."""
    rows = signature.outputs
    for spellings in (lambda row: (row.name,), lambda row: (row.path,), lambda row: (row.node,), _whole):
        found = [row for row in rows if name in spellings(row)]
        if found:
            return _only(found, name, [row.name for row in found])
    owner = next((row.name for row in signature.inputs if name in (row.name, row.path, *row.aliases)), None)
    found = [row for row in rows if owner is not None and row.of == owner]
    if found:
        return _only(found, name, [row.name for row in found])
    raise _unknown("output", name, [text for row in rows for text in (row.name, row.path)])


def _only(found: Sequence[Row], name: str, spellings: Iterable[str]) -> Row:
    if len(found) > 1:
        raise SelectionError(
            f"{name!r} fits several: {', '.join(spellings)}", remedy="use one of these names"
        )
    return found[0]


def _unknown(what: str, name: str, known: Sequence[str]) -> SelectionError:
    close = get_close_matches(name, known, n=3)
    remedy = (
        f"did you mean {', '.join(close)}?"
        if close
        else f"the {what}s are listed by print(program.signature)"
    )
    return SelectionError(f"no {what} is called {name!r}", remedy=remedy)

"""Everything that keeps arguments from fitting a Python signature; Python itself names the first."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence

Rows = Collection[inspect.Parameter]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def binding_faults(
    parameters: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    """What does not fit, in Python's words; empty when the arguments bind."""
    try:
        parameters.bind(*args, **kwargs)
    except TypeError as error:
        rows = parameters.parameters.values()
        found = [*_positional(rows, args), *_missing(rows, args, kwargs), *_keywords(rows, args, kwargs)]
        return found or [str(error)]
    return []


def _by_position(rows: Rows) -> list[inspect.Parameter]:
    return [row for row in rows if row.kind in _BY_POSITION]


def _takes(rows: Rows, kind: object) -> bool:
    return any(row.kind is kind for row in rows)


def _positional(rows: Rows, args: Sequence[object]) -> Iterator[str]:
    if len(args) > len(_by_position(rows)) and not _takes(rows, inspect.Parameter.VAR_POSITIONAL):
        yield "too many positional arguments"


def _missing(rows: Rows, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[str]:
    given = {row.name for row in _by_position(rows)[: len(args)]} | {*kwargs}
    single = (*_BY_POSITION, inspect.Parameter.KEYWORD_ONLY)
    for row in rows:
        if row.kind in single and row.default is inspect.Parameter.empty and row.name not in given:
            yield f"missing a required argument: {row.name!r}"


def _keywords(rows: Rows, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[str]:
    filled = {row.name for row in _by_position(rows)[: len(args)]}
    known = {row.name for row in rows if row.kind is not inspect.Parameter.POSITIONAL_ONLY}
    for name in kwargs:
        if name in filled & known:
            yield f"multiple values for argument {name!r}"
        elif name not in known and not _takes(rows, inspect.Parameter.VAR_KEYWORD):
            yield f"got an unexpected keyword argument {name!r}"

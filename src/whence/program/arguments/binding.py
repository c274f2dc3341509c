"""How arguments bind to a Python signature, and everything that keeps them from it."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

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


def arguments_by_name(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that bind, or some of them, under the names of the parameters that take them.

    The members of `*args` are called `*0`, `*1`, …, and a keyword that only `**kwargs` takes `**name`.
    """
    named: dict[str, Any] = {}
    for name, value in parameters.bind_partial(*args, **kwargs).arguments.items():
        match parameters.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                named |= {f"*{position}": item for position, item in enumerate(value)}
            case inspect.Parameter.VAR_KEYWORD:
                named |= {f"**{key}": item for key, item in value.items()}
            case _:
                named[name] = value
    return named


def name_of_keyword(parameters: inspect.Signature, keyword: str) -> str:
    """The name under which the argument of a keyword is found among those by name."""
    taking = parameters.parameters.get(keyword)
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return keyword if taking is not None and taking.kind in single else f"**{keyword}"


def defaults_of(parameters: inspect.Signature) -> dict[str, Any]:
    """The parameters that need not be given, with what they are then."""
    rows = parameters.parameters.values()
    return {row.name: row.default for row in rows if row.default is not inspect.Parameter.empty}

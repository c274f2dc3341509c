"""How arguments bind to a Python signature, and everything that keeps them from it."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whence._torch.plain_values import same_constant

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


@dataclass(frozen=True)
class GivenAt:
    """Stands for an argument: a positional one, or one by keyword."""

    key: int | str

    def among(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument of a call."""
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


@dataclass(frozen=True)
class CallSpelling:
    """Where a call, of so many positional arguments and such keywords, has the arguments of the captured one.

    They are given, or defaults; `beside` are others, which must be the defaults that they were at capture.
    Tracers read this.
    """

    positional: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    beside: tuple[tuple[str, GivenAt, Any], ...] = ()

    def arranged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments as the capture wrote them."""
        return (
            tuple([_argument_found(where, args, kwargs) for where in self.positional]),
            {name: _argument_found(where, args, kwargs) for name, where in self.keywords},
        )

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """The arguments that were left out at capture and are none of the defaults: name, default, value."""
        rows = [(name, default, where.among(args, kwargs)) for name, where, default in self.beside]
        return [row for row in rows if not _is_default(row[1], row[2])]


def _argument_found(where: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return where.among(args, kwargs) if isinstance(where, GivenAt) else where


def _is_default(default: Any, given: Any) -> bool:
    if isinstance(default, tuple | list) and type(default) is type(given) and len(default) == len(given):
        return all(_is_default(*pair) for pair in zip(default, given, strict=True))
    if isinstance(default, dict) and type(default) is type(given) and list(default) == list(given):
        return all(_is_default(default[key], given[key]) for key in default)
    return same_constant(default, given)


Shape = tuple[int, tuple[str, ...]]
"""How many positional arguments a call has, and its keywords."""


def spelling_of(parameters: inspect.Signature | None, captured: Shape, given: Shape) -> CallSpelling:
    """How a call is to be read that binds; as it is, where its arguments cannot be those of the capture."""
    args, kwargs = tuple(map(GivenAt, range(given[0]))), {name: GivenAt(name) for name in given[1]}
    as_it_is = CallSpelling(args, tuple(kwargs.items()))
    if parameters is None:
        return as_it_is
    rows = parameters.parameters.values()
    defaults = {row.name: row.default for row in rows if row.default is not inspect.Parameter.empty}
    positional = list(arguments_by_name(parameters, range(captured[0]), {}))
    keywords = [(keyword, _name_of(parameters, keyword)) for keyword in captured[1]]
    wanted = {*positional, *(name for _, name in keywords)}
    found = arguments_by_name(parameters, args, kwargs)
    beside = tuple((name, at, defaults.get(name)) for name, at in found.items() if name not in wanted)
    if not (wanted <= {*defaults, *found} and {name for name, _, _ in beside} <= {*defaults}):
        return as_it_is
    held = defaults | found
    return CallSpelling(
        tuple(held[name] for name in positional), tuple((key, held[name]) for key, name in keywords), beside
    )


def _name_of(parameters: inspect.Signature, keyword: str) -> str:
    """The name under which the argument of a keyword is found among those by name."""
    taking = parameters.parameters.get(keyword)
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return keyword if taking is not None and taking.kind in single else f"**{keyword}"

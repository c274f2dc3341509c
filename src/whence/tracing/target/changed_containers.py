"""Containers that a model is given, and changes: a program cannot, for it sees only what they hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whence._torch.plain_values import PLAIN, same_constant
from whence._torch.pytrees import children_of
from whence.errors import Fault, SideEffect
from whence.tracing.target.subject import Subject

_SHOWN = 4
_Children = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Container:
    """Something inside an argument that holds others, and what it held: each with the access to it.

    `around` are the identities of the containers it is in, and its own.
    """

    path: str
    value: Any
    held: _Children
    around: frozenset[int]


def containers_in(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Container]:
    """All containers inside the arguments of a call."""
    args, kwargs = arguments
    given = [*((f"args[{at}]", value) for at, value in enumerate(args))]
    given += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    return [container for path, value in given for container in _containers(path, value, frozenset())]


def refuse_changes(subject: Subject, given: Sequence[Container], result: Any) -> None:
    """Raise `SideEffect` that names every container that holds something else now.

    One that the model returns is none of them: what it holds comes back with the result.
    """
    changed = [(container, other) for container in given if (other := _others(container))]
    returned = {id(each.value) for each in _containers("", result, frozenset())} if changed else set()
    SideEffect.refuse(
        Fault(
            f"{subject.name} changes what `{container.path}` holds: {', '.join(other)}",
            where=subject.place,
            why="a program reads the values in a container and gives values back; the container itself would "
            "stay as it was, where eager changes it",
            remedy="let the model work on a copy of it, or return it",
        )
        for container, other in changed
        if not container.around & returned
    )


def _containers(path: str, value: Any, around: frozenset[int]) -> Iterator[Container]:
    if isinstance(value, Tensor) or id(value) in around or (children := children_of(value)) is None:
        return
    inside = around | {id(value)}
    yield Container(path, value, tuple((access, child) for _, access, child in children), inside)
    for _, access, child in children:
        yield from _containers(path + access, child, inside)


def _others(container: Container) -> list[str]:
    """What was put in, taken out, or replaced."""
    before = dict(container.held)
    after = {access: child for _, access, child in children_of(container.value) or ()}
    put = [f"{access} is new" for access in after if access not in before]
    gone = [f"{access} is gone" for access in before if access not in after]
    both = [access for access in before if access in after]
    replaced = [f"{access} is another" for access in both if not _is_same(before[access], after[access])]
    found = [*replaced, *put, *gone]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]


def _is_same(before: Any, after: Any) -> bool:
    return before is after or (type(before) in PLAIN and same_constant(before, after))

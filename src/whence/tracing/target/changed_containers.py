"""Containers that a model is given, and changes: a program changes those that come back with the result."""

from collections.abc import Sequence
from typing import Any

from whence._torch.plain_values import PLAIN, same_constant
from whence._torch.pytrees import children_of
from whence.errors import Fault, SideEffect
from whence.program.arguments.containers import Container, containers_of, is_changeable
from whence.tracing.target.subject import Subject

_SHOWN = 4


def changed_and_returned(
    subject: Subject, given: Sequence[Container], result: Any
) -> tuple[tuple[str, str], ...]:
    """The containers that hold something else now: where each was given, and where it is in the result.

    Raises `SideEffect` that names every one that does not come back.
    """
    changed = [(container, other) for container in given if (other := _others(container))]
    if not changed:
        return ()
    returned = {id(each.value): each.path for each in reversed([*containers_of(result)])}
    SideEffect.refuse(
        Fault(
            f"{subject.name} changes what `{container.path}` holds: {', '.join(other)}",
            where=subject.place,
            why="a program reads the values in a container and gives values back; the container itself would "
            "stay as it was, where eager changes it",
            remedy="let the model work on a copy of it, or return it",
        )
        for container, other in changed
        if not container.around & returned.keys()
    )
    rows = [(row.path, returned[id(row.value)]) for row, _ in changed if id(row.value) in returned]
    return tuple(rows) if all(is_changeable(row.value) for row, _ in changed) else ()


def _others(container: Container) -> list[str]:
    """What was put in, taken out, or replaced."""
    before = dict(container.held)
    after = {access: child for _, access, child in children_of(container.value) or ()}
    put = [f"{access} is new" for access in after if access not in before]
    gone = [f"{access} is gone" for access in before if access not in after]
    both = [access for access in before if access in after]
    replaced = [f"{access} is another" for access in both if not _is_unchanged(before[access], after[access])]
    found = [*replaced, *put, *gone]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]


def _is_unchanged(before: Any, after: Any) -> bool:
    return before is after or (type(before) in PLAIN and same_constant(before, after))

"""Containers among the arguments of a call, and those that the call changes and gives back."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whence._torch.pytrees import children_of, with_parts_replaced

_Children = tuple[tuple[str, Any], ...]
_MAPPINGS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Container:
    """Something inside an argument or a result that holds others, and what it held, by access.

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
    return [container for path, value in given for container in containers_of(value, path)]


def containers_of(value: Any, path: str = "", around: frozenset[int] = frozenset()) -> Iterator[Container]:
    """All containers inside a value at a path, and itself."""
    if isinstance(value, Tensor) or id(value) in around or (children := children_of(value)) is None:
        return
    inside = around | {id(value)}
    yield Container(path, value, tuple((access, child) for _, access, child in children), inside)
    for _, access, child in children:
        yield from containers_of(child, path + access, inside)


def is_changeable(value: Any) -> bool:
    """Whether `handed_back` can make it hold something else."""
    return type(value) in (*_MAPPINGS, list, deque) or hasattr(value, "__dict__")


def handed_back(
    returned: Mapping[str, str], arguments: tuple[tuple[Any, ...], dict[str, Any]], result: Any
) -> Any:
    """A result with containers of the arguments in it, which hold now what it holds there.

    `returned` has the place of each in the result, by its place in the arguments.
    """
    made = {container.path: container.value for container in containers_of(result)}
    kept = {}
    for container in containers_in(arguments):
        if container.path in returned:
            new = made[returned[container.path]]
            kept[id(new)] = _holding(container.value, new)
    return with_parts_replaced(result, kept)


def _holding(container: Any, new: Any) -> Any:
    if type(container) in _MAPPINGS:
        container.clear()
        container.update(new)
    elif type(container) in (list, deque):
        container.clear()
        container.extend(new)
    else:
        vars(container).update(vars(new))
    return container

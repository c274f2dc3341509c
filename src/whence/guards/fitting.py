"""Whether inputs fit a program that has no guards: what a call asks of them, and no more."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from whence._torch.sizes.symbols import is_symbolic
from whence.dependence.describe import shown
from whence.errors import CallError
from whence.guards.inputs import leaf_guard, size_guard, structure_guard, tie_guards
from whence.program import Convention
from whence.program.arguments.convention import misplaced, shown_call
from whence.program.arguments.open_sizes import Sizes, found_of
from whence.program.guards.rows import Violation


def misfits(convention: Convention, args: object, kwargs: object) -> list[Violation]:
    """Everything for which a call with these arguments would be refused, as violations; empty where none."""
    structure = structure_guard(convention)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
        return [Violation(structure, f"args of {type(args).__name__} and kwargs of {type(kwargs).__name__}")]
    args, kwargs = tuple(args), dict(kwargs or {})
    try:
        leaves = convention.spelled_out(args, kwargs)
    except (CallError, RecursionError):
        return [Violation(structure, shown_call(args, kwargs))]
    try:
        convention.checked(leaves)
    except CallError as error:
        found = list(_misfits(convention, leaves, {position for position, _ in error.misfits}))
        return found or list(_misplaced(convention, leaves)) or [Violation(structure, error.why)]
    return []


def _misplaced(convention: Convention, leaves: Sequence[object]) -> Iterator[Violation]:
    """Tensors that lie otherwise in memory, which only a program that reads memory is asked about."""
    rows = zip(convention.paths, convention.leaves, leaves, strict=True)
    for position, (path, expected, given) in enumerate(rows):
        if misplaced(path, expected, given) is not None:
            yield Violation(leaf_guard(position, path, expected, with_strides=True), shown(given))


def _misfits(convention: Convention, leaves: Sequence[object], refused: set[int]) -> Iterator[Violation]:
    sizes = convention.varying
    others = set() if sizes is None else set(_other_shapes(convention, sizes, leaves))
    for position in sorted(refused | others):
        path, leaf = convention.paths[position], convention.leaves[position]
        guard = leaf_guard(position, path, leaf, with_strides=False)
        yield Violation(guard, shown(leaves[position]))
    if sizes is not None and not others:
        yield from (Violation(size_guard(rule), found_of(rule, leaves)) for rule in sizes.broken(leaves))
    for guard in tie_guards(convention):
        first, second = guard.positions
        if leaves[first] is not leaves[second]:
            yield Violation(guard, "two tensors")


def _other_shapes(convention: Convention, sizes: Sizes, leaves: Sequence[object]) -> Iterator[int]:
    """Positions of leaves from which sizes cannot be read: of another rank or another fixed size."""
    for position, (expected, leaf) in enumerate(zip(convention.leaves, leaves, strict=True)):
        if (is_symbolic(expected) and type(leaf) is not int) or (
            isinstance(expected, Tensor)
            and not (isinstance(leaf, Tensor) and sizes.admits(position, leaf.shape))
        ):
            yield position

"""Whether inputs fit a program that has no guards: what a call asks of them, and no more."""

from collections.abc import Iterator, Sequence

from whence.dependence.describe import shown
from whence.errors import CallError
from whence.guards.inputs import leaf_guard, leaves_of, other_shapes, size_guard, structure_guard, tie_guards
from whence.program import Convention
from whence.program.arguments.convention import misplaced
from whence.program.arguments.open_sizes import found_of
from whence.program.guards.rows import Violation


def misfits(convention: Convention, args: object, kwargs: object) -> list[Violation]:
    """Everything for which a call with these arguments would be refused, as violations; empty where none."""
    structure, leaves = structure_guard(convention), leaves_of(convention, args, kwargs)
    if isinstance(leaves, str):
        return [Violation(structure, leaves)]
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
    others = set() if sizes is None else set(other_shapes(convention, sizes, leaves))
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

"""What a capture assumed of its inputs, and whether other inputs keep to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import is_elementwise
from whence._torch.sizes.symbols import is_symbolic
from whence._torch.tensors import PLAIN_TENSORS, share_memory
from whence.dependence.describe import expected_tensor, reference, shown
from whence.dependence.matching import Walk, difference
from whence.dependence.tensor_facts import is_like
from whence.dependence.values import is_constant
from whence.errors import CallError
from whence.program import Convention, FlatProgram
from whence.program.arguments.convention import shown_call
from whence.program.arguments.fitting import ArgumentFault, Misfit
from whence.program.arguments.open_sizes import SizeRule, found_of, shape_of, strides_of
from whence.program.guards.expectations import Expectation, ExpectedConstant, ExpectedTensor, ExpectedWords
from whence.program.guards.guards import APART, STRUCTURE
from whence.program.guards.rows import Guard, Violation
from whence.schema import GuardKind, InputKind, OutputKind

TIED = "one tensor"
SIZE = "size"

_EMBEDDING = torch.ops.aten.embedding.default


def input_guards(program: FlatProgram) -> Iterator[Guard]:
    """The structure of the arguments, every leaf, and which leaves are one tensor."""
    convention = program.convention
    yield structure_guard(convention)
    strided = _layout_sensitive(program)
    for position, (path, leaf) in enumerate(zip(convention.paths, convention.leaves, strict=True)):
        yield leaf_guard(position, path, leaf, with_strides=position in strided)
    for rule in () if convention.sizes is None else convention.sizes.rules:
        yield size_guard(rule)
    yield from tie_guards(convention)
    if _writes_inputs(program):
        what = "the inputs, some of which are written,"
        yield Guard(GuardKind.ALIASING, what, ExpectedWords(APART), _APART, APART)


def structure_guard(convention: Convention) -> Guard:
    """How the arguments are nested."""
    why = "every tensor and constant among the arguments is one input of the program"
    return Guard(GuardKind.INPUT, STRUCTURE, ExpectedWords(convention.shown), why, STRUCTURE)


def tie_guards(convention: Convention) -> Iterator[Guard]:
    """Which leaves are one tensor."""
    for first, second in convention.same:
        what = f"{convention.paths[first]} and {convention.paths[second]}"
        yield Guard(GuardKind.ALIASING, what, ExpectedWords(TIED), _ONE, positions=(first, second))


_ONE = "a write to one was a write to both, and their gradients were summed"
_APART = "a write to one would be a write to another"


def leaf_guard(position: int, path: str, leaf: object, *, with_strides: bool) -> Guard:
    """What one tensor, number or constant among the arguments is."""
    if isinstance(leaf, Tensor):
        found = expected_tensor(leaf)
        strides = strides_of(leaf) if with_strides and found.facts.strides is not None else None
        facts = found.facts._replace(type=Tensor, shape=shape_of(leaf), strides=strides)
        expected: Expectation = replace(found, facts=facts)
        reason = "the operations were recorded for a tensor like this"
    elif is_symbolic(leaf):
        expected, reason = ExpectedWords("a whole number"), "it is computed with"
    else:
        expected = ExpectedConstant(leaf) if is_constant(leaf) else reference(leaf)
        reason = "its value decided what was recorded"
    return Guard(GuardKind.INPUT, path, expected, reason, positions=(position,))


def size_guard(rule: SizeRule) -> Guard:
    """What sizes must keep."""
    reason = "asked for" if rule.by.asked else "the code decided by it"
    positions = tuple(row.position for row in rule.dimensions)
    what, by = str(rule.dimensions[0]), (rule.by.module, rule.by.source)
    return Guard(GuardKind.SIZE, what, rule, reason, SIZE, None, None, *by, positions)


def _writes_inputs(program: FlatProgram) -> bool:
    users = {row.name for row in program.signature.inputs if row.kind is InputKind.USER}
    return any(row.of in users for row in program.signature.outputs_of(OutputKind.MUTATION))


def _layout_sensitive(program: FlatProgram) -> set[int]:
    """Positions of the inputs whose strides may have decided something.

    Only element-wise operations and lookups in tables give the same for every layout: all others choose
    kernels, views or orders of summation by it.
    """
    rows = [row for row in program.signature.inputs if row.kind is InputKind.USER]
    return {
        position
        for position, row in enumerate(rows)
        if row.layout_read or _is_sensitive(program.node(row.name))
    }


def _is_sensitive(node: fx.Node) -> bool:
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            if user.target is _EMBEDDING and user.args[0] is not value:
                continue
            if not is_elementwise(user.target):
                return True
            waiting.append(user)
    return False


def input_violations(
    convention: Convention, guards: Sequence[Guard], args: object, kwargs: object
) -> Iterator[Violation]:
    """Every guard on the inputs that these arguments do not keep; never raises."""
    leaves = leaves_of(convention, args, kwargs)
    if isinstance(leaves, str):
        yield Violation(next(guard for guard in guards if guard.name == STRUCTURE), leaves)
        return
    walk = Walk(same_model=True)
    sizes = {} if convention.sizes is None else convention.sizes.bound_if_admitted(leaves)
    for guard in guards:
        found = _found(guard, leaves, walk, sizes)
        if found is not None:
            yield Violation(guard, found)


def leaves_of(convention: Convention, args: object, kwargs: object) -> list[Any] | str:
    """The leaves of a call; in words what it is, where its arguments are nested otherwise."""
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
        return f"args of {type(args).__name__} and kwargs of {type(kwargs).__name__}"
    args, kwargs = tuple(args), dict(kwargs or {})
    try:
        return convention.in_order(args, kwargs)
    except (CallError, RecursionError):
        return shown_call(args, kwargs)


def misfits(convention: Convention, args: object, kwargs: object) -> list[Violation]:
    """Everything for which a call of a program that has no guards would be refused, as violations."""
    leaves = leaves_of(convention, args, kwargs)
    if isinstance(leaves, str):
        return [Violation(structure_guard(convention), leaves)]
    return [
        Violation(_guard_of(convention, row), _in_words(row)) for row in convention.expected.faults(leaves)
    ]


def _guard_of(convention: Convention, row: ArgumentFault) -> Guard:
    if row.kind is Misfit.SIZE:
        return size_guard(row.expected)
    if row.kind is Misfit.TIED:
        return next(guard for guard in tie_guards(convention) if guard.positions == row.positions)
    return leaf_guard(row.positions[0], row.path, row.expected, with_strides=row.kind is Misfit.LAYOUT)


def _in_words(row: ArgumentFault) -> str:
    if row.kind is Misfit.SIZE:
        return str(row.found)
    return "two tensors" if row.kind is Misfit.TIED else shown(row.found)


def _found(guard: Guard, leaves: Sequence[object], walk: Walk, sizes: Mapping[str, int] | None) -> str | None:
    expected = guard.expected
    if isinstance(expected, ExpectedTensor):
        leaf = leaves[guard.positions[0]]
        if is_like(leaf, expected.facts, PLAIN_TENSORS):
            return None
        if expected.facts.varies:
            return _found_tensor(expected, leaf, walk, sizes)
    if isinstance(expected, SizeRule):
        return None if sizes is None or expected.holds(sizes) else found_of(expected, leaves)
    if isinstance(expected, ExpectedWords) and len(guard.positions) == 1:
        leaf = leaves[guard.positions[0]]
        return None if type(leaf) is int else shown(leaf)
    match guard.positions:
        case (position,):
            return difference(guard.expected, leaves[position], walk)
        case (first, second):
            return None if leaves[first] is leaves[second] else "two tensors"
        case _:
            return _shared(leaves) if guard.name == APART else None


def _found_tensor(
    expected: ExpectedTensor, leaf: object, walk: Walk, sizes: Mapping[str, int] | None
) -> str | None:
    """A tensor whose sizes may vary against one in a call; its sizes have guards of their own."""
    if not isinstance(leaf, Tensor) or len(leaf.shape) != len(expected.facts.shape):
        return shown(leaf)
    if sizes is not None:
        return difference(replace(expected, facts=expected.facts.at(leaf.shape, sizes)), leaf, walk)
    shape = zip(expected.facts.shape, leaf.shape, strict=True)
    kept = torch.Size(given if isinstance(size, str) else size for size, given in shape)
    return difference(replace(expected, facts=expected.facts._replace(shape=kept, strides=None)), leaf, walk)


def _shared(leaves: Sequence[object]) -> str | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    pairs = ((left, right) for i, left in enumerate(tensors) for right in tensors[:i] if left is not right)
    return "views of one storage" if any(share_memory(left, right) for left, right in pairs) else None

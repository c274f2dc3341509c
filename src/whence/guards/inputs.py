"""What a capture assumed of its inputs, and whether other inputs keep to it."""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import is_elementwise
from whence._torch.sizes.symbols import is_symbolic
from whence._torch.tensor_questions import is_question, spelled
from whence.dependence.code import IDENTITY
from whence.dependence.describe import expected_tensor, reference, shown
from whence.dependence.values import is_constant
from whence.errors import CallError
from whence.program import Convention, FlatProgram
from whence.program.arguments.convention import overlaps, shown_call, tied_positions
from whence.program.arguments.fitting import ArgumentFault, InputQuery, Misfit
from whence.program.arguments.open_sizes import SizeRule, shape_of, strides_of
from whence.program.guards.expectations import Expectation, ExpectedConstant, ExpectedWords
from whence.program.guards.guards import APART, SAME, STRUCTURE, GuardPlan
from whence.program.guards.rows import Guard, Violation
from whence.schema import GuardKind, InputKind, OutputKind

TIED = "one tensor"
SIZE = "size"

_EMBEDDING = torch.ops.aten.embedding.default


def input_guards(program: FlatProgram, named: Container[str]) -> Iterator[Guard]:
    """The structure of the arguments, every leaf, and which leaves are one tensor; also which are not, where
    code compares identities, as the names say that are `named` in it."""
    convention = program.convention
    yield from _guards_of(convention, _layout_sensitive(program))
    if IDENTITY in named and sum(isinstance(leaf, Tensor) for leaf in convention.leaves) > 1:
        what, tied = "which of the arguments are one tensor", _in_pairs(convention.same)
        yield Guard(GuardKind.ALIASING, what, ExpectedWords(tied), _TOLD, SAME)
    if written := _positions_written(program):
        what = "the inputs, some of which are written,"
        yield Guard(GuardKind.ALIASING, what, ExpectedWords(APART), _APART, APART, positions=written)


def _guards_of(convention: Convention, strided: Set[int]) -> Iterator[Guard]:
    yield structure_guard(convention)
    for position, (path, leaf) in enumerate(zip(convention.paths, convention.leaves, strict=True)):
        yield leaf_guard(position, path, leaf, with_strides=position in strided)
    for query in convention.questions:
        what = spelled(query.question, convention.paths[query.position])
        reason = _VIEWED if query.source is None else _ASKED
        row = Guard(GuardKind.INPUT, what, ExpectedConstant(query.answer), reason, query.question)
        yield row._replace(source=query.source, positions=(query.position,))
    for rule in () if convention.varying is None else convention.varying.rules:
        yield size_guard(rule)
    yield from tie_guards(convention)


def structure_guard(convention: Convention) -> Guard:
    """How the arguments are nested."""
    why = "every tensor and constant among the arguments is one input of the program"
    return Guard(GuardKind.INPUT, STRUCTURE, ExpectedWords(convention.shown), why, STRUCTURE)


def tie_guards(convention: Convention) -> Iterator[Guard]:
    """Which leaves are one tensor."""
    for first, second in convention.same:
        what = f"{convention.paths[first]} and {convention.paths[second]}"
        yield Guard(GuardKind.ALIASING, what, ExpectedWords(TIED), _ONE, positions=(first, second))


_ASKED = "the model asked for it, and what it decided is part of the program"
_VIEWED = "what is made of it depends on that"
_TOLD = "code asks of two variables whether they are one object"
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


def _positions_written(program: FlatProgram) -> tuple[int, ...]:
    """Positions of the inputs that the program changes."""
    users = [row.name for row in program.signature.inputs if row.kind is InputKind.USER]
    written = {row.of for row in program.signature.outputs_of(OutputKind.MUTATION)}
    return tuple(position for position, name in enumerate(users) if name in written)


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
    convention: Convention, plan: GuardPlan, args: object, kwargs: object
) -> Iterator[Violation]:
    """Every guard on the inputs that these arguments do not keep; never raises."""
    leaves = leaves_of(convention, args, kwargs)
    if isinstance(leaves, str):
        yield Violation(next(guard for guard in plan.inputs if guard.name == STRUCTURE), leaves)
        return
    expected = convention.watched(plan.strided)
    yield from () if expected.fit(leaves) else _violations(plan.inputs, expected.faults(leaves))
    for guard in plan.inputs:
        written = guard.positions or range(len(leaves))
        if guard.name == APART and (shared := overlaps(convention, written, leaves)):
            yield Violation(guard, " and ".join(shared[0]) + " in one memory")
        if guard.name == SAME and guard.expected != ExpectedWords(tied := _in_pairs(tied_positions(leaves))):
            yield Violation(guard, tied)


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
    faults = convention.expected.faults(leaves)
    strided = {at for row in faults if row.kind is Misfit.LAYOUT for at in row.positions}
    return _violations([*_guards_of(convention, strided)], faults)


def _violations(guards: Sequence[Guard], faults: Sequence[ArgumentFault]) -> list[Violation]:
    """What does not fit, by the guards that speak of it, each once and in their order."""
    numbers = {_subject_of(guard): number for number, guard in enumerate(guards)}
    found: dict[int, ArgumentFault] = {}
    for row in faults:
        found.setdefault(numbers[_subject(row)], row)
    return [
        Violation(guards[number], _fault_in_words(guards[number], found[number])) for number in sorted(found)
    ]


def _subject_of(guard: Guard) -> Hashable:
    if isinstance(guard.expected, SizeRule):
        return guard.expected
    is_asked = bool(guard.name) and is_question(guard.name)
    return (*guard.positions, guard.name) if is_asked else guard.positions


def _subject(row: ArgumentFault) -> Hashable:
    if isinstance(row.expected, SizeRule):
        return row.expected
    return row.expected.asked if isinstance(row.expected, InputQuery) else row.positions


def _fault_in_words(guard: Guard, row: ArgumentFault) -> str:
    if row.kind is Misfit.SIZE:
        return str(row.found)
    if row.kind is Misfit.TIED:
        return "two tensors"
    found = shown(row.found)
    return f"{found} ({row.words})" if found == str(guard.expected) else found


def _in_pairs(tied: Sequence[tuple[int, int]]) -> str:
    """Which leaves are one tensor, by number."""
    return ", ".join(f"{first} and {second}" for first, second in tied) or "none"

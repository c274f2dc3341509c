"""Single sizes that a branch excludes, and a mode that it asks for: a rule that nobody needs goes; for other
sizes there is a variant."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, product
from typing import TypeVar

import torch

from whence._torch.autograd.mode_questions import GRAD
from whence._torch.pytrees import tree_flatten, tree_unflatten
from whence._torch.sizes.symbols import admit
from whence.dependence.asking import Failed, tried
from whence.dependence.observed import Observed
from whence.errors import Fault, WhenceError
from whence.program import FlatProgram
from whence.program.arguments.open_sizes import SizeRule, Sizes
from whence.program.arguments.variants import in_words
from whence.program.queries.same_operations import same_operations
from whence.schema import TensorFact
from whence.tracing.answers import Answers, with_eager_answers
from whence.tracing.decisions import with_decisions, with_open_numbers
from whence.tracing.target.example import Given, Numbers

P = TypeVar("P", bound=FlatProgram)
_MOST = 16
"""A model that branches by more sizes than this is left with its rules, and a warning says so."""
Captured = tuple[FlatProgram, Observed]
_FEW = 2
"""A branch that excludes more sizes than this is about ranges, and is left alone."""
_FEW_ARGUMENTS = 2
"""Of more arguments every combination of answers would be too many captures."""
_LARGEST = 4096
"""Further up no excluded size is looked for."""


def variant_faults(variants: object, dynamic_shapes: object, strict: bool) -> list[Fault]:
    """Why there can be no variants, where some are asked for."""
    if not isinstance(variants, bool):
        return [Fault(f"variants cannot be {variants!r}", remedy="use True or False")]
    found: list[Fault] = []
    if variants and dynamic_shapes is None:
        why = "a variant is for a size that may vary and that one branch excludes, and all sizes are fixed"
        found.append(Fault("variants=True needs dynamic_shapes", why=why, remedy="say which sizes may vary"))
    if variants and strict:
        why = "PyTorch's bytecode front end is not asked for the other side of a branch"
        found.append(Fault("variants does not work with strict=True", why=why, remedy="use strict=False"))
    return found


@dataclass(frozen=True)
class _Excluded:
    """Sizes for which a program is missing: by name, and as they were found in one capture after another."""

    sizes: tuple[tuple[str, int], ...]
    numbers: tuple[Numbers, ...]

    def __str__(self) -> str:
        return in_words(self.sizes)


def with_variants_at(program: P, again: Callable[[tuple[Numbers, ...]], P]) -> P:
    """The program, with what `again` captures at each size that a branch excludes, and at several of them.

    A size for which the model itself has an error stays excluded; where it cannot be captured there, a
    warning says why.
    """
    found: dict[frozenset[tuple[str, int]], P] = {}
    waiting = [*_missing(program, _Excluded((), ()))]
    for at in waiting:  # which grows
        if frozenset(at.sizes) in found:
            continue
        if len(found) == _MOST:
            warnings.warn(f"there are more than {_MOST} variants: where {at} there is none", stacklevel=4)
            break
        other = _captured(at, again)
        if other is not None:
            found[frozenset(at.sizes)] = other
            waiting += _missing(other, at)
    return program.with_changes(variants=tuple(found.values()))


def _missing(program: FlatProgram, known: _Excluded) -> Iterator[_Excluded]:
    """The sizes that a program excludes, beside those that are numbers in it."""
    sizes = program.convention.sizes
    if sizes is None:
        return
    for at in excluded_sizes(sizes):
        yield _Excluded(tuple(sorted([*known.sizes, *at.items()])), (*known.numbers, (sizes, at)))


def _captured(at: _Excluded, again: Callable[[tuple[Numbers, ...]], P]) -> P | None:
    with warnings.catch_warnings(action="ignore"):  # they were given already
        other = tried(lambda: again(at.numbers))
    if not isinstance(other, Failed):
        return other.under(numbers=at.sizes)
    if isinstance(other.error, WhenceError):  # not the model's own, which has no way for such a size
        first = str(other.error).partition("\n")[0]
        warnings.warn(f"there is no variant where {at}, which stays excluded: {first}", stacklevel=5)
    return None


Again = Callable[[Numbers], Captured]
"""Captures once more, with these numbers."""


def captured_for_sizes(given: Given, capture: Callable[[Answers, Given], Captured]) -> Captured:
    """What `capture` gives, with symbols for what data decide, for all sizes and grad modes in which it is
    right."""

    def once(given: Given) -> Captured:
        return with_eager_answers(
            given.told, lambda answers: with_decisions(given, partial(capture, answers))
        )

    found = with_open_numbers(given, once)
    told, known = found[0].asked, given.numbers
    if given.dynamic_shapes is not None:
        found = without_needless_rules(
            found, lambda numbers: once(replace(given, numbers=(*known, numbers), told=told))
        )
    found = without_needless_modes(found, lambda: once(replace(given, told=told)))
    return without_needless_facts(found, lambda paths: once(_turned(replace(given, told=told), found, paths)))


def without_needless_rules(captured: Captured, again: Again) -> Captured:
    """The program without rules that exclude single sizes for which it computes what the model does.

    Code that compares a size with 1 goes one way for 1 and another for all others, and often both ways
    compute the same. So the model is captured once more with the size that is excluded.
    """
    program, observed = captured
    sizes = program.convention.sizes
    if sizes is None:
        return captured
    known: dict[tuple[str, int], bool] = {}

    def is_same_at(at: Mapping[str, int]) -> bool:
        with warnings.catch_warnings(action="ignore"):  # they were given already
            other = tried(lambda: again((sizes, at)))
        return _does_the_same(captured, other, at)

    def is_same(name: str, size: int) -> bool:
        if (name, size) not in known:
            admitted = [pair for pair, is_admitted in known.items() if is_admitted]
            known[name, size] = all(map(is_same_at, _combined((name, size), admitted)))
            if known[name, size]:
                admit((row.value for row in program.signature.inputs), name, size)
        return known[name, size]

    rules = tuple(left for rule in sizes.rules for left in _needed(rule, sizes, is_same))
    convention = replace(program.convention, sizes=replace(sizes, rules=rules))
    return program.with_changes(convention=convention), observed


def _combined(pair: tuple[str, int], admitted: Sequence[tuple[str, int]]) -> Iterator[Mapping[str, int]]:
    """A size alone, and together with those that were admitted before: what code does may depend on both."""
    others = [other for other in admitted if other[0] != pair[0]]
    for count in range(len(others) + 1):
        for chosen in combinations(others, count):
            if len({name for name, _ in chosen}) == count:
                yield dict([pair, *chosen])


def _needed(rule: SizeRule, sizes: Sizes, is_same: Callable[[str, int], bool]) -> Iterator[SizeRule]:
    """What is left of a rule."""
    name, excluded = _excluded(rule, sizes)
    left = [size for size in excluded if not is_same(name, size)]
    if len(left) == len(excluded):
        yield rule
        return
    for size in left:
        words = "at least 1" if size == 0 else f"other than {size}"
        yield replace(rule, condition=f"{name} != {size}", words=words)


def _excluded(rule: SizeRule, sizes: Sizes) -> tuple[str, list[int]]:
    """The size that code compared with numbers, and the values that it excludes where nothing else does."""
    name, broken = _compared(rule)
    others = [other for other in sizes.rules if other is not rule and other.names == rule.names]
    return name, [size for size in broken if all(other.holds({name: size}) for other in others)]


def _compared(rule: SizeRule) -> tuple[str, list[int]]:
    """The size that code compared with numbers, and the few values that this excludes."""
    names = rule.names
    if rule.by.asked or len(names) != 1 or rule.dimensions[0].dim is None:
        return "", []
    (name,) = names
    all_broken = (size for size in range(_LARGEST) if not rule.holds({name: size}))
    broken = list(islice(all_broken, _FEW + 1))
    return name, broken if len(broken) <= _FEW else []


def excluded_sizes(sizes: Sizes) -> Iterator[Mapping[str, int]]:
    """The single sizes, each by name, that branches exclude, and that were asked for."""
    asked = [rule for rule in sizes.rules if rule.by.asked and len(rule.names) == 1]
    compared = dict.fromkeys((name, size) for name, few in map(_compared, sizes.rules) for size in few)
    for name, size in compared:
        if all(rule.holds({name: size}) for rule in asked if name in rule.names):
            yield {name: size}


def without_needless_modes(captured: Captured, again: Callable[[], Captured]) -> Captured:
    """The program without the question for the grad mode, where the model computes the same in the other one:
    attention asks before it takes a path without derivative, and of frozen layers takes it either way. What
    it puts on a value there that no graph has, a hook, it does not do without."""
    program, observed = captured
    others = tuple(mode for mode in program.circumstances.modes if mode.name != GRAD)
    if others == program.circumstances.modes or program.has_backward:
        return captured
    other = _attempted(again, records=not torch.is_grad_enabled())
    return (program.under(modes=others), observed) if _is_like(captured, other) else captured


def _attempted(again: Callable[[], Captured], *, records: bool) -> Captured | Failed:
    """What a capture gives where gradients are recorded, or are not."""
    if records == torch.is_grad_enabled():
        return tried(again)
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        return tried(again)


def without_needless_facts(captured: Captured, again: Callable[[Sequence[str]], Captured]) -> Captured:
    """The program without the questions whether an argument requires a gradient, where the answers change
    nothing: a parameter does, of which the model asks the same, or it computes the same either way."""
    program, observed = captured
    asked = [path for path, fact in program.convention.facts if fact is TensorFact.REQUIRES_GRAD]
    if program.has_backward or not 0 < len(asked) <= _FEW_ARGUMENTS:
        return captured
    turned = [each for count in range(len(asked)) for each in combinations(asked, count + 1)]
    records = torch.is_grad_enabled()
    is_free = all(mode.name != GRAD for mode in program.circumstances.modes)  # a run in either mode is let in
    for paths, mode in product(turned, (records, not records) if is_free else (records,)):
        if not _is_like(captured, _attempted(partial(again, paths), records=mode)):
            return captured
    rest = tuple(row for row in program.convention.facts if row[1] is not TensorFact.REQUIRES_GRAD)
    return program.with_changes(convention=replace(program.convention, facts=rest)), observed


def _turned(given: Given, captured: Captured, paths: Sequence[str]) -> Given:
    """The same, where these arguments require a gradient if they did not, and none if they did."""
    leaves, spec = tree_flatten((given.args, given.kwargs or {}))
    rows = zip(captured[0].convention.paths, leaves, strict=True)
    turned = [
        leaf.detach().requires_grad_(not leaf.requires_grad) if path in paths else leaf for path, leaf in rows
    ]
    args, kwargs = tree_unflatten(turned, spec)
    return replace(given, args=args, kwargs=kwargs)


def _is_like(captured: Captured, other: Captured | Failed) -> bool:
    """Whether a capture under other circumstances gave the same, also of what no graph has."""
    if isinstance(other, Failed) or not _does_the_same(captured, other, {}):
        return False
    mine, theirs = captured[0].circumstances, other[0].circumstances
    return set(theirs.opaque) <= set(mine.opaque)


def _does_the_same(open_: Captured, fixed: Captured | Failed, at: Mapping[str, int]) -> bool:
    """Whether a program does, at these sizes, what another does that was captured there."""
    if isinstance(fixed, Failed):
        return False
    (program, observed), (other, seen) = open_, fixed
    if not _places_read(seen) <= _places_read(observed) or bool(seen.left) is not bool(observed.left):
        return False
    if [str(call.site) for call in program.calls] != [str(call.site) for call in other.calls]:
        return False
    return _conditions(other) <= _conditions(program) and same_operations(program, other, at)


def _conditions(program: FlatProgram) -> set[str]:
    sizes = program.convention.sizes
    return set() if sizes is None else {rule.condition for rule in sizes.rules}


def _places_read(observed: Observed) -> set[tuple[int | str, str]]:
    variables = {(found.path, "") for found, _ in observed.variables}
    return {*((id(read.holder), read.name) for read in observed.reads), *variables}

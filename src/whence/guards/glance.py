"""One quick look at a whole model: is it, attribute by attribute, what it was?

Nearly all checks find nothing, and a check runs before every call, on a machine whose caches the call before
has filled with other things. So equal modules share one pattern, a module's plain attributes are fetched at
once and compared by identity, its hooks by being empty, and the looking stops at the first thing that is
otherwise; that need not be a violation. The exact rules are in `check.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from whence._torch.observe.hooks import HOOK_KINDS, has_own_hooks
from whence._torch.observe.wrappers import seen_through, wrappers_around
from whence.dependence.matching import Walk
from whence.dependence.tensor_facts import is_like
from whence.dependence.values import same_constant
from whence.guards.found import found_in_module
from whence.program.arguments.convention import repeated_positions
from whence.program.guards.expectations import (
    ExpectedConstant,
    ExpectedHolder,
    ExpectedNames,
    ExpectedTensor,
    Hooks,
    Missing,
    Reference,
    Snapshot,
    TensorFacts,
)
from whence.program.guards.rows import Guard, Holder
from whence.schema import GuardKind

_hooks_of = itemgetter(*HOOK_KINDS)
_TABLES = {GuardKind.PARAMETER: "_parameters", GuardKind.BUFFER: "_buffers"}


class Pattern(NamedTuple):
    """What is expected of a module, as far as it can be seen quickly; equal modules share one.

    `read` fetches the attributes that are expected to be `constants`, `flag` names the only one. The class
    answers `shadowed` names, so the instance must not. `tensors` are rows of table, name and facts, which
    are None where None is expected.
    """

    type: type
    flag: str | None
    read: Callable[[Any], tuple[Any, ...]] | None
    constants: tuple[Any, ...]
    has_no_hooks: bool
    shadowed: tuple[str, ...]
    tensors: tuple[tuple[str, str, TensorFacts | None], ...]


@dataclass(frozen=True)
class Glance:
    """What to look at, module by module: the position of each one's parent (-1 for a root), its name there
    and its pattern.

    `aliases` are further names: position of the module, of a parent, and the name. `others` are guards that
    have to be compared by themselves, with the position of their module. `numbers` are those of the tensors
    in the order they are met, `ties` the pairs of them that are one, `distinct` how many there are. `objects`
    are attributes that hold an object: position of the module, name, what is held, spelling. It `notes`
    what stands for which number where guards on anything else ask for that.
    """

    parents: tuple[int, ...]
    names: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    aliases: tuple[tuple[int, int, str], ...]
    others: tuple[tuple[int, Guard], ...]
    numbers: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    distinct: int
    objects: tuple[tuple[int, str, ExpectedHolder, str], ...]
    notes: bool


def glance_of(
    holders: Sequence[Holder],
    guards: Sequence[Sequence[Guard]],
    shadowed: Sequence[tuple[str, ...]],
    on_objects: Sequence[Guard],
) -> Glance:
    """What to look at for these modules, parents first, each with its guards and the names its class has.

    `on_objects` are the guards on what is no module.
    """
    patterns: dict[object, Pattern] = {}
    rows = [_quick(own) for own in guards]
    made = [
        _pattern(patterns, holder.type, row, names)
        for holder, row, names in zip(holders, rows, shadowed, strict=True)
    ]
    quick = {id(guard) for row in rows for guard in (*row.plain, *row.tensors, *row.hooks, *row.objects)}
    numbers = [
        guard.expected.number
        for row in rows
        for guard in row.tensors
        if isinstance(guard.expected, ExpectedTensor)
    ]
    first = [holder.place or (-1, "") for holder in holders]
    others = tuple(
        (at, guard) for at, own in enumerate(guards) for guard in own if guard.name and id(guard) not in quick
    )
    asking = (*(guard for _, guard in others), *on_objects)
    return Glance(
        parents=tuple(parent for parent, _ in first),
        names=tuple(name for _, name in first),
        patterns=tuple(made),
        aliases=tuple((at, *alias) for at, holder in enumerate(holders) for alias in holder.aliases),
        others=others,
        numbers=tuple(numbers),
        ties=repeated_positions(numbers),
        distinct=len(set(numbers)),
        objects=tuple(
            (at, guard.name, guard.expected, guard.what)
            for at, row in enumerate(rows)
            for guard in row.objects
            if isinstance(guard.expected, ExpectedHolder)
        ),
        notes=not all(_stands_alone(guard, len(holders)) for guard in asking),
    )


def _stands_alone(guard: Guard, modules: int) -> bool:
    """Whether a guard can be compared without knowing which module or tensor stands for which number."""
    if isinstance(guard.expected, ExpectedHolder):
        return guard.expected.number >= modules
    return isinstance(guard.expected, ExpectedConstant | ExpectedNames | Missing | Reference | Snapshot)


@dataclass(frozen=True)
class _Quick:
    """The guards of a module that can be seen quickly."""

    plain: tuple[Guard, ...]
    tensors: tuple[Guard, ...]
    hooks: tuple[Guard, ...]
    objects: tuple[Guard, ...]


def _quick(guards: Sequence[Guard]) -> _Quick:
    return _Quick(
        plain=tuple(filter(_is_plain, guards)),
        tensors=tuple(filter(_is_tensor, guards)),
        hooks=tuple(filter(_is_unhooked, guards)),
        objects=tuple(filter(_is_object, guards)),
    )


def _is_unhooked(guard: Guard) -> bool:
    return guard.kind is GuardKind.HOOKS and guard.expected == Hooks()


def _is_object(guard: Guard) -> bool:
    return guard.kind is GuardKind.ATTRIBUTE and isinstance(guard.expected, ExpectedHolder)


def _is_plain(guard: Guard) -> bool:
    kinds = (GuardKind.ATTRIBUTE, GuardKind.TRAINING)
    return guard.kind in kinds and isinstance(guard.expected, ExpectedConstant)


def _is_tensor(guard: Guard) -> bool:
    expected = guard.expected
    facts = isinstance(expected, ExpectedTensor) and not (expected.parts or expected.attributes)
    return guard.kind in _TABLES and (facts or expected == ExpectedConstant(None))


def _pattern(patterns: dict[object, Pattern], kind: type, row: _Quick, shadowed: tuple[str, ...]) -> Pattern:
    names = tuple(guard.name for guard in row.plain)
    constants = tuple(_value(guard) for guard in row.plain)
    tensors = tuple((_TABLES[guard.kind], guard.name, _facts(guard)) for guard in row.tensors)
    spelled = tuple((type(value), repr(value)) for value in constants)
    key = (kind, names, spelled, bool(row.hooks), shadowed, tensors)
    if key not in patterns:
        patterns[key] = Pattern(
            type=kind,
            flag=names[0] if len(names) == 1 else None,
            read=itemgetter(*names) if len(names) > 1 else None,
            constants=constants,
            has_no_hooks=bool(row.hooks),
            shadowed=shadowed,
            tensors=tensors,
        )
    return patterns[key]


def _value(guard: Guard) -> Any:
    return guard.expected.value if isinstance(guard.expected, ExpectedConstant) else None


def _facts(guard: Guard) -> TensorFacts | None:
    return guard.expected.facts if isinstance(guard.expected, ExpectedTensor) else None


def is_as_it_was(glance: Glance, roots: Sequence[object], walk: Walk) -> list[Tensor] | None:
    """The tensors of all modules where they are what they were, as far as a quick look tells; else None.

    Objects that modules hold are left to be looked at in `walk`.
    """
    modules: list[Any] = []
    tensors: list[Tensor] = []
    try:
        if not _fit(glance, iter(roots), modules, tensors):
            return None
        for at, parent, name in glance.aliases:
            if _inside(modules[parent].__dict__["_modules"][name]) is not modules[at]:
                return None
        if not _are_held_alike(glance, modules, walk):
            return None
    except (KeyError, StopIteration, RuntimeError):  # a tensor of another layout has no strides
        return None
    if not _are_tied_alike(glance, tensors):
        return None
    if glance.notes:
        walk.holders |= enumerate(modules)
        note_tensors(glance, tensors, walk)
    return tensors if _others_hold(glance, modules, walk) else None


def _fit(glance: Glance, roots: Iterator[object], modules: list[Any], tensors: list[Tensor]) -> bool:
    """Whether each module fits its pattern: the hot loop, in which a call would cost as much as a look."""
    hooks_of, step = _hooks_of, modules.append
    for parent, name, pattern in zip(glance.parents, glance.names, glance.patterns, strict=True):
        module: Any = next(roots) if parent < 0 else modules[parent].__dict__["_modules"][name]
        kind, flag, read, constants, has_no_hooks, shadowed, expected = pattern
        if type(module) is not kind and type(module := _inside(module)) is not kind:
            return False
        held = module.__dict__
        if flag is not None:
            if held[flag] is not constants[0] and not same_constant(constants[0], held[flag]):
                return False
        elif read is not None and not _are(read(held), constants):
            return False
        if has_no_hooks and any(hooks_of(held)):
            return False
        for method in shadowed:
            if method in held:
                return False
        for table, attribute, facts in expected:
            tensor = held[table][attribute]
            if facts is None and tensor is None:
                continue
            if facts is None or not is_like(tensor, facts):
                return False
            tensors.append(tensor)
        step(module)
    return True


def _inside(module: object) -> object:
    """What a wrapper without hooks of its own wraps."""
    if not isinstance(module, nn.Module) or any(map(has_own_hooks, wrappers_around(module))):
        return module
    return seen_through(module)


def note_tensors(glance: Glance, tensors: Sequence[Tensor], walk: Walk) -> None:
    """Say which tensor stands for each number of the capture."""
    walk.tensors |= zip(glance.numbers, tensors, strict=True)
    walk.numbers |= zip(map(id, tensors), glance.numbers, strict=True)


def _are_held_alike(glance: Glance, modules: Sequence[Any], walk: Walk) -> bool:
    """Whether objects that several modules share are still shared; one for each number is looked into."""
    met: dict[int, object] = {}
    told: set[int] = set()
    for at, name, held, what in glance.objects:
        value = modules[at].__dict__[name]
        if met.setdefault(held.number, value) is not value or type(value) is not held.type:
            return False
        if held.number not in told:
            told.add(held.number)
            walk.waiting.append((held.number, value, what))
    return True


def _are(values: Sequence[Any], constants: Sequence[Any]) -> bool:
    return all(map(is_, values, constants)) or all(map(same_constant, constants, values))


def _are_tied_alike(glance: Glance, tensors: Sequence[Tensor]) -> bool:
    """Whether as many are one as before, and the same."""
    if len(set(map(id, tensors))) != glance.distinct:
        return False
    return all(tensors[left] is tensors[right] for left, right in glance.ties)


def _others_hold(glance: Glance, modules: Sequence[Any], walk: Walk) -> bool:
    return all(found_in_module(guard, modules[at], walk) is None for at, guard in glance.others)

"""Guards sorted for checking: by holder, by class, and those about neither."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from whence.guards.inputs import APART, STRUCTURE
from whence.guards.modes import GLOBAL_HOOKS, MODES
from whence.program.expectations import Constant, Hooks, TensorFacts
from whence.program.guard_rows import Guard, Holder
from whence.program.guards import Guards
from whence.schema import GuardKind

_TABLES = {GuardKind.PARAMETER: "_parameters", GuardKind.BUFFER: "_buffers"}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors expected in one table of a module: name and facts, None where None was found."""

    table: str
    rows: tuple[tuple[str, TensorFacts | None], ...]


@dataclass(frozen=True, slots=True)
class HolderPlan:
    """The guards of one holder, sorted for a quick look.

    A module is found as `name` in the module numbered `parent`, and under other names if it is `aliased`.
    One that was called `has_mode`: its mode is guarded.
    `read` fetches the attributes that are expected to be `constants`, `flag` names the only one;
    `has_no_hooks` says that hooks are guarded, and none is expected. `of_class` are guards that its class
    answers, so that the instance must have nothing of their names (`shadowed`). `others` are compared one
    by one.
    """

    holder: Holder
    number: int
    type: type
    aliased: bool
    has_mode: bool
    parent: int | None
    name: str
    guards: tuple[Guard, ...]
    flag: str | None
    read: Callable[[Any], tuple[Any, ...]] | None
    constants: tuple[Any, ...]
    tensors: tuple[Tensors, ...]
    has_no_hooks: bool
    shadowed: tuple[str, ...]
    of_class: tuple[Guard, ...]
    others: tuple[Guard, ...]


@dataclass(frozen=True)
class Plan:
    """Guards ready to be checked.

    `modules` are the holders that are found by name, parents first; other holders are met where a guard
    expects them. `numbers` are those of the tensors that modules are expected to hold.
    """

    guards: Guards
    holders: tuple[HolderPlan, ...]
    modules: tuple[HolderPlan, ...]
    classes: dict[type, tuple[Guard, ...]]
    callables: tuple[Guard, ...]
    modes: tuple[Guard, ...]
    inputs: tuple[Guard, ...]


def plan_of(guards: Guards) -> Plan:
    """Sort guards by what they speak of."""
    classes: dict[type, list[Guard]] = {}
    held: dict[int, list[Guard]] = {row.number: [] for row in guards.holders}
    for guard in guards:
        if guard.holder is not None:
            held[guard.holder].append(guard)
        elif guard.owner is not None:
            classes.setdefault(guard.owner, []).append(guard)
    rows = tuple(_holder_plan(row, held[row.number], classes.get(row.type, [])) for row in guards.holders)
    return Plan(
        guards=guards,
        holders=rows,
        modules=tuple(row for row in rows if row.parent is not None or row.holder.root is not None),
        classes={kind: tuple(found) for kind, found in classes.items()},
        callables=tuple(guard for guard in guards if guard.kind is GuardKind.CALLABLE),
        modes=tuple(guard for guard in guards if guard.name in MODES or guard.name == GLOBAL_HOOKS),
        inputs=tuple(guard for guard in guards if guard.positions or guard.name in (STRUCTURE, APART)),
    )


def _holder_plan(holder: Holder, guards: Sequence[Guard], of_class: Sequence[Guard]) -> HolderPlan:
    rows = [guard for guard in guards if guard.name]
    plain = [guard for guard in rows if holder.is_module and _is_plain(guard)]
    tensors = [guard for guard in rows if _is_tensor(guard)]
    hooks = [guard for guard in rows if guard.kind is GuardKind.HOOKS and guard.expected == Hooks()]
    quick = {id(guard) for guard in (*plain, *tensors, *hooks)}
    names = [guard.name for guard in plain]
    own = {guard.name for guard in rows}
    answered = tuple(guard for guard in of_class if guard.name not in own)
    parent, name = holder.names[0] if holder.names else (None, "")
    return HolderPlan(
        holder=holder,
        number=holder.number,
        type=holder.type,
        aliased=len(holder.names) > 1,
        has_mode=any(guard.kind is GuardKind.TRAINING for guard in guards),
        parent=parent,
        name=name,
        guards=tuple(guards),
        flag=names[0] if len(names) == 1 else None,
        read=itemgetter(*names) if len(names) > 1 else None,
        constants=tuple(_value(guard) for guard in plain),
        tensors=tuple(_tensors(kind, table, tensors) for kind, table in _tables(tensors)),
        has_no_hooks=bool(hooks),
        shadowed=tuple(guard.name for guard in answered if guard.name != "__call__"),
        of_class=answered,
        others=tuple(guard for guard in rows if id(guard) not in quick),
    )


def _is_plain(guard: Guard) -> bool:
    kinds = (GuardKind.ATTRIBUTE, GuardKind.TRAINING)
    return guard.kind in kinds and isinstance(guard.expected, Constant)


def _value(guard: Guard) -> Any:
    return guard.expected.value if isinstance(guard.expected, Constant) else None


def _is_tensor(guard: Guard) -> bool:
    return guard.kind in _TABLES and (
        isinstance(guard.expected, TensorFacts) or guard.expected == Constant(None)
    )


def _tables(tensors: Sequence[Guard]) -> list[tuple[GuardKind, str]]:
    return [(kind, table) for kind, table in _TABLES.items() if any(guard.kind is kind for guard in tensors)]


def _tensors(kind: GuardKind, table: str, guards: Sequence[Guard]) -> Tensors:
    rows = tuple(
        (guard.name, guard.expected if isinstance(guard.expected, TensorFacts) else None)
        for guard in guards
        if guard.kind is kind
    )
    return Tensors(table, rows)

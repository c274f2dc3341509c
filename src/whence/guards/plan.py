"""Guards sorted for checking: by holder, by class, and those about neither."""

from collections.abc import Sequence
from dataclasses import dataclass

from whence.dependence.switches import GLOBAL_HOOKS, MODES
from whence.guards.glance import Glance, glance_of
from whence.guards.input_look import InputGlance, input_glance_of
from whence.guards.inputs import APART, STRUCTURE
from whence.program import Convention
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.guards.guards import Guards
from whence.program.guards.rows import Guard, Holder
from whence.schema import GuardKind


@dataclass(frozen=True)
class HolderPlan:
    """The guards of one holder.

    A module that was called `has_mode`: its mode is guarded. `of_class` are guards that its class answers, so
    that the instance must have nothing of their names.
    """

    holder: Holder
    has_mode: bool
    guards: tuple[Guard, ...]
    of_class: tuple[Guard, ...]

    @property
    def shadowed(self) -> tuple[str, ...]:
        """Names that the class answers; `__call__` is looked up on classes only."""
        return tuple(guard.name for guard in self.of_class if guard.name != "__call__")


@dataclass(frozen=True)
class GuardPlan:
    """Guards ready to be checked.

    `modules` are the holders that are found by name, parents first, and `glance` is a quick look at them;
    other holders are met where a guard expects them.
    """

    guards: Guards
    holders: tuple[HolderPlan, ...]
    modules: tuple[HolderPlan, ...]
    glance: Glance
    classes: dict[type, tuple[Guard, ...]]
    callables: tuple[Guard, ...]
    modes: tuple[Guard, ...]
    variables: tuple[tuple[Guard, Outside], ...]
    inputs: tuple[Guard, ...]
    input_glance: InputGlance | None
    settled: "GuardPlan | None" = None


def plan_of(guards: Guards, convention: Convention) -> GuardPlan:
    """Sort guards by what they speak of; `convention` is that of the program they belong to."""
    classes: dict[type, list[Guard]] = {}
    held: dict[int, list[Guard]] = {row.number: [] for row in guards.holders}
    for guard in guards:
        if guard.holder is not None:
            held[guard.holder].append(guard)
        elif guard.owner is not None:
            classes.setdefault(guard.owner, []).append(guard)
    rows = tuple(_holder_plan(row, held[row.number], classes.get(row.type, [])) for row in guards.holders)
    modules = tuple(row for row in rows if row.holder.is_found_by_name)
    variables = [guard for guard in guards if guard.kind is GuardKind.VARIABLE]
    inputs = tuple(guard for guard in guards if guard.positions or guard.name in (STRUCTURE, APART))
    return GuardPlan(
        guards=guards,
        holders=rows,
        modules=modules,
        glance=glance_of(
            [row.holder for row in modules],
            [row.guards for row in modules],
            [row.shadowed for row in modules],
            [guard for row in rows if not row.holder.is_found_by_name for guard in row.guards],
        ),
        classes={kind: tuple(found) for kind, found in classes.items()},
        callables=tuple(guard for guard in guards if guard.kind is GuardKind.CALLABLE),
        modes=tuple(guard for guard in guards if guard.name in MODES or guard.name == GLOBAL_HOOKS),
        variables=tuple(zip(variables, guards.variables, strict=True)),
        inputs=inputs,
        input_glance=input_glance_of(inputs, convention),
        settled=None if guards.settled is None else plan_of(guards.settled, convention),
    )


def _holder_plan(holder: Holder, guards: Sequence[Guard], of_class: Sequence[Guard]) -> HolderPlan:
    own = {guard.name for guard in guards}
    return HolderPlan(
        holder=holder,
        has_mode=any(guard.kind is GuardKind.TRAINING for guard in guards),
        guards=tuple(guards),
        of_class=tuple(guard for guard in of_class if guard.name not in own),
    )

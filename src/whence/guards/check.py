"""Does a capture still hold? A check walks the live model along the plan of its guards.

Nearly all checks find nothing, so each module is first compared as a whole: its plain attributes in one
tuple, by identity, its hooks by being empty, its tensors field by field. Only a module that differs there
is looked at guard by guard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from whence._torch.hooks import gradient_hooks
from whence._torch.sharding import class_as_written
from whence._torch.tensors import has_gradient_hooks
from whence.guards.asking import Failed, ask
from whence.guards.describe import Describer
from whence.guards.hooks import TABLES, hook_rows
from whence.guards.lookup import NOTHING, class_attribute, module_attribute, same_class
from whence.guards.matching import Walk, difference, same_constant
from whence.guards.modes import GLOBAL_HOOKS, MODES, described_global_hooks
from whence.guards.plan import HolderPlan, Plan
from whence.program.expectations import Constant, Hooks, Missing, Names, Reference
from whence.program.guard_rows import Guard, Violation
from whence.schema import GuardKind

_hooks_of = itemgetter(*TABLES)


@dataclass(frozen=True)
class Checked:
    """What does not hold, and the live tensors that were met, in the order of the guards."""

    violations: list[Violation]
    tensors: tuple[Tensor, ...] = ()


def check_model(plan: Plan, call: object, roots: Sequence[object], *, has_backward: bool) -> Checked:
    """Every guard on the model, its classes and the process; never raises.

    `roots` are the modules that `call` reaches, in the order of the capture.
    """
    roots = roots if plan.callables else (call,)
    captured = plan.guards.of.target() if isinstance(plan.guards.of, Reference) else None
    walk = Walk(same_model=bool(roots) and roots[0] is captured)
    violations = list(_callable_violations(plan, call, walk))
    violations += _module_violations(plan, roots, walk)
    violations += _object_violations(plan, walk)
    violations += _class_violations(plan, walk)
    if has_backward:
        violations += _gradient_hook_violations(plan, walk)
    violations += _mode_violations(plan)
    return Checked(violations, tuple(walk.tensors.values()))


def _callable_violations(plan: Plan, call: Any, walk: Walk) -> Iterator[Violation]:
    for guard in plan.callables:
        found = difference(guard.expected, call, walk)
        if found is not None:
            yield Violation(guard, found)


def _module_violations(plan: Plan, roots: Sequence[object], walk: Walk) -> list[Violation]:
    """Modules from the roots down: found by their names, compared as a whole, then guard by guard."""
    violations: list[Violation] = []
    live, turned = walk.holders, set[int]()
    for row in plan.modules:
        above = None if row.parent is None else live.get(row.parent)
        module: Any = _root(row, roots) if above is None else above.__dict__["_modules"].get(row.name)
        kind = type(module)
        if kind is not row.type and not same_class(row.type, kind):
            if row.parent is None or above is not None:  # what is below a lost module is not told of
                violations.append(Violation(row.guards[0], _other(module)))
            continue
        live[row.number] = module
        if row.aliased:
            violations += _alias_violations(row, module, live)
        if not _holds_at_a_glance(row, module, walk):
            found = list(_guard_by_guard(row, row.guards, module, walk))
            violations += [v for v in found if not _follows(v, row, turned)]
            turned |= {row.number for v in found if v.guard.kind is GuardKind.TRAINING}
        elif row.others:
            violations += _guard_by_guard(row, row.others, module, walk)
    return violations


def _follows(violation: Violation, row: HolderPlan, turned: set[int]) -> bool:
    """Whether a mode changed because that of the module above did: `model.eval()` is one change."""
    return violation.guard.kind is GuardKind.TRAINING and row.parent in turned


def _root(row: HolderPlan, roots: Sequence[object]) -> object:
    number = row.holder.root
    return None if number is None or number >= len(roots) else roots[number]


def _other(found: object) -> str:
    return "absent" if found is None else type(found).__name__


def _alias_violations(row: HolderPlan, module: Any, live: dict[int, Any]) -> Iterator[Violation]:
    aliases = [guard for guard in row.guards if guard.kind is GuardKind.ALIASING]
    for guard, (parent, name) in zip(aliases, row.holder.names[1:], strict=False):
        above = live.get(parent)
        if above is not None and above.__dict__["_modules"].get(name) is not module:
            yield Violation(guard, "two modules")


def _holds_at_a_glance(row: HolderPlan, module: Any, walk: Walk) -> bool:
    """Whether everything common about a module is exactly as it was; if not, that need not mean a thing."""
    held = module.__dict__
    try:
        if row.flag is not None:
            if held[row.flag] is not row.constants[0]:
                return False
        elif row.read is not None and not all(map(is_, row.read(held), row.constants)):
            return False
        if row.has_no_hooks and any(_hooks_of(held)):
            return False
        for name in row.shadowed:
            if name in held:
                return False
        for expected in row.tensors:
            if not _hold(expected.rows, held[expected.table], walk):
                return False
    except KeyError:
        return False
    return True


def _hold(rows: Sequence[tuple[str, Any]], table: dict[str, Any], walk: Walk) -> bool:
    for name, facts in rows:
        tensor = table[name]
        if facts is None:
            if tensor is not None:
                return False
        elif not (
            type(tensor) is facts.type
            and tensor.requires_grad is facts.requires_grad
            and tensor.dtype is facts.dtype
            and tensor.shape == facts.shape
            and tensor.device == facts.device
            and tensor.stride() == facts.strides
            and walk.tensors.setdefault(facts.number, tensor) is tensor
            and walk.numbers.setdefault(id(tensor), facts.number) == facts.number
        ):
            return False
    return True


def _guard_by_guard(
    row: HolderPlan, guards: Sequence[Guard], module: nn.Module, walk: Walk
) -> Iterator[Violation]:
    for guard in guards:
        found = _found_in_module(guard, module, walk) if guard.name else None
        if found is not None:
            yield Violation(guard, found)
    for guard in row.of_class if guards is row.guards else ():
        if guard.name in module.__dict__ and not _is_own_method(module, guard.name):
            yield _shadowing(row, guard, module.__dict__[guard.name])


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Whether an instance only repeats what its class answers."""
    value = module.__dict__[name]
    own = class_attribute(type(module), name)
    return getattr(value, "__func__", value) is own and getattr(value, "__self__", None) is module


def _shadowing(row: HolderPlan, guard: Guard, value: object) -> Violation:
    """The class had the last word at capture; now the instance has an attribute of that name."""
    path = f"{row.holder.path}.{guard.name}" if row.holder.path else guard.name
    own = replace(guard, what=path, holder=row.holder.number)
    return Violation(own, str(Describer({}).describe(value)))


def _found_in_module(guard: Guard, module: nn.Module, walk: Walk) -> str | None:
    """What is there in the place of what a guard expects, or None when that is it."""
    walk.at = guard.what
    if guard.kind is GuardKind.HOOKS:
        return _found_hooks(guard, hook_rows(module), walk)
    if guard.kind is GuardKind.STRUCTURE:
        found = Names(tuple(module.__dict__[guard.name]))
        return None if guard.expected == found else str(found)
    value = module_attribute(module, guard.name)
    if isinstance(guard.expected, Missing):
        value = class_attribute(class_as_written(type(module)), guard.name) if value is NOTHING else value
        return None if value is NOTHING else str(Describer({}).describe(value))
    return "absent" if value is NOTHING else difference(guard.expected, value, walk)


def _found_hooks(guard: Guard, rows: Sequence[tuple[str, Any]], walk: Walk) -> str | None:
    expected = guard.expected.rows if isinstance(guard.expected, Hooks) else ()
    same = len(rows) == len(expected) and all(
        kind == wanted and difference(function, hook, walk) is None
        for (kind, hook), (wanted, function) in zip(rows, expected, strict=True)
    )
    describer = Describer({})
    return None if same else str(Hooks(tuple((kind, describer.describe(hook)) for kind, hook in rows)))


def _object_violations(plan: Plan, walk: Walk) -> Iterator[Violation]:
    """Objects that modules hold, each live one once for every object of the capture it stands for."""
    seen: set[tuple[int, int]] = set()
    for number, thing, path in walk.waiting:  # which grows while objects lead to others
        row = plan.holders[number]
        if (number, id(thing)) in seen or (row.holder.names or row.holder.root is not None):
            continue
        seen.add((number, id(thing)))
        if isinstance(thing, nn.Module):
            yield from _guard_by_guard(row, row.guards, thing, walk)
            continue
        for guard in row.guards:
            here = replace(guard, what=f"{path}.{guard.name}")
            found = _found_in_object(here, thing, walk)
            if found is not None:
                yield Violation(here, found)


def _found_in_object(guard: Guard, thing: object, walk: Walk) -> str | None:
    walk.at = guard.what
    value = ask(thing, guard.name)
    if isinstance(value, Failed):
        return str(value)
    if isinstance(guard.expected, Missing):
        return None if value is NOTHING else str(Describer({}).describe(value))
    return "absent" if value is NOTHING else difference(guard.expected, value, walk)


def _class_violations(plan: Plan, walk: Walk) -> Iterator[Violation]:
    """What classes hold, once for each class: another function under the name of a method, for one."""
    for kind, guards in plan.classes.items():
        for guard in guards:
            found = difference(guard.expected, class_attribute(kind, guard.name), walk)
            if found is not None:
                yield Violation(guard, found)


def _gradient_hook_violations(plan: Plan, walk: Walk) -> Iterator[Violation]:
    """Hooks on parameters, of which a program with a backward has none: they change gradients."""
    for row in plan.holders:
        module = walk.holders.get(row.holder.number)
        if not isinstance(module, nn.Module):
            continue
        for table, name in ((rows.table, name) for rows in row.tensors for name, _ in rows.rows):
            tensor = module.__dict__[table].get(name)
            if isinstance(tensor, Tensor) and has_gradient_hooks(tensor):
                guard = next(guard for guard in row.guards if guard.name == name)
                what = f"gradient hooks of {guard.what}"
                none = replace(guard, what=what, kind=GuardKind.HOOKS, expected=Hooks())
                yield Violation(none, ", ".join(gradient_hooks(tensor)))


def _mode_violations(plan: Plan) -> Iterator[Violation]:
    for guard in plan.modes:
        if guard.name == GLOBAL_HOOKS:
            found = described_global_hooks(Describer({}))
            if found != guard.expected:
                yield Violation(guard, str(found))
            continue
        value = MODES[guard.name].read()
        if isinstance(guard.expected, Constant) and not same_constant(guard.expected.value, value):
            yield Violation(guard, str(value))

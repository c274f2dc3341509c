"""Does a capture still hold? A check walks the live model along the plan of its guards.

Where an earlier check is remembered, and all that it met is the same (`memory.py`), modules are not walked
again.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence._torch.observe.hooks import gradient_hooks, gradient_hooks_before, has_gradient_hooks
from whence._torch.observe.wrappers import seen_through, wrapper_chain
from whence._torch.patching import without_patches
from whence.dependence.asking import Failed, ask
from whence.dependence.describe import code_of, function_of, shown
from whence.dependence.lookup import class_attribute, same_class
from whence.dependence.matching import Walk, difference, found_in_place, is_marked
from whence.guards.memory import Remembered, found_in_module
from whence.guards.switches import mode_violations
from whence.program.guards.expectations import (
    Expectation,
    ExpectedFunction,
    ExpectedTensor,
    ExpectedThing,
    Hooks,
    Snapshot,
)
from whence.program.guards.guards import GuardPlan, HolderPlan
from whence.program.guards.rows import Guard, Violation
from whence.program.names import Unfound
from whence.schema import GuardKind

Hookless = Sequence[str] | None
"""The state on whose gradients hooks may not be, by name; None for all."""


@dataclass(frozen=True)
class Checked:
    """What does not hold, the live tensors that were met, and what a run would change of what it reads."""

    violations: list[Violation]
    tensors: tuple[Tensor, ...] = ()
    changes: tuple[str, ...] = ()


def check_model(
    plan: GuardPlan, call: object, roots: Sequence[object], memory: Remembered | None, hookless: Hookless
) -> Checked:
    """Every guard on the model, its classes and the process; never raises.

    `roots` are the modules that `call` reaches, in the order of the capture. `memory` is for further checks.
    """
    plans = [plan] if plan.settled is None else [plan, plan.settled]
    if memory is not None and memory.last is not None and memory.last.plan is plan.settled:
        plans.reverse()
    found: list[Checked] = []
    for each in plans:
        found.append(_checked_plan(each, call, roots, memory, hookless))
        if not found[-1].violations:
            return found[-1]
    return min(found if plans[0] is plan else found[::-1], key=lambda checked: len(checked.violations))


def _checked_plan(
    plan: GuardPlan, call: object, roots: Sequence[object], memory: Remembered | None, hookless: Hookless
) -> Checked:
    roots = roots if plan.callables else (call,)
    captured = None if plan.guards.of is None else plan.guards.of.target()
    is_captured = bool(roots) and _module_inside(roots[0], Walk(same_model=False)) is captured
    walk = Walk(same_model=is_captured, spelled=plan.guards.spelled, any_layout=plan.guards.any_layout)
    violations: list[Violation] = []
    known = None if memory is None or memory.last is None else memory.last.again(plan, roots, walk)
    if known is not None:
        walk = known
    elif not (violations := _module_violations(plan, roots, walk)) and memory is not None:
        memory.keep(plan, roots, walk)
    violations = [*_callable_violations(plan, call, walk), *violations]
    violations += _object_violations(plan, walk)
    violations += _class_violations(plan, walk)
    violations += _gradient_hook_violations(plan, walk, hookless)
    violations += _variable_violations(plan, walk)
    violations += mode_violations(plan.modes)
    return Checked(violations, tuple(walk.tensors.values()), plan.guards.changes)


def _callable_violations(plan: GuardPlan, call: Any, walk: Walk) -> Iterator[Violation]:
    for guard in plan.callables:
        found = difference(guard.expected, call, walk)
        if found is not None:
            yield Violation(guard, found)


def _module_violations(plan: GuardPlan, roots: Sequence[object], walk: Walk) -> list[Violation]:
    """Modules from the roots down: found by their names, then compared guard by guard, for some guards are
    about which of them it is.

    `model.eval()` is one change: a mode that was turned with that of the module above is not told of.
    """
    violations: list[Violation] = []
    turned, lost = set[int](), dict(_found_by_name(plan, roots, walk))
    for row in plan.modules:
        parent, _ = row.holder.place or (None, "")
        module = walk.holders.get(row.holder.number)
        if module is None:
            violations += lost.get(row.holder.number, ())
            continue
        if not row.has_mode and parent in turned:
            turned.add(row.holder.number)
        found = list(_guard_by_guard(row, module, walk))
        violations += [v for v in found if v.guard.kind is not GuardKind.TRAINING or parent not in turned]
        turned |= {row.holder.number for v in found if v.guard.kind is GuardKind.TRAINING}
    return [*violations, *_alias_violations(plan, walk.holders)]


def _found_by_name(
    plan: GuardPlan, roots: Sequence[object], walk: Walk
) -> Iterator[tuple[int, list[Violation]]]:
    """Let the walk know the modules by their numbers; those that are lost, with what is in their place."""
    for row in plan.modules:
        parent, name = row.holder.place or (None, "")
        above = None if parent is None else walk.holders.get(parent)
        held = _root(row, roots) if above is None else above.__dict__["_modules"].get(name)
        module = _module_inside(held, walk)
        is_another = walk.numbers.setdefault(id(module), row.holder.number) != row.holder.number
        if same_class(row.holder.type, type(module)) and not is_another:
            walk.holders[row.holder.number] = module
        elif parent is None or above is not None:  # what is below a lost module is not told of
            is_one = is_another and module is not None
            yield (
                row.holder.number,
                [Violation(row.guards[0], "one with another" if is_one else _other(module))],
            )


def _module_inside(held: object, walk: Walk) -> Any:
    """The module that is held, behind what wraps it."""
    if not isinstance(held, nn.Module):
        return held
    wrappers, module = wrapper_chain(held), seen_through(held)
    if wrappers:
        walk.wrappers[id(module)] = wrappers
    return module


def _root(row: HolderPlan, roots: Sequence[object]) -> object:
    number = row.holder.root
    return None if number is None or number >= len(roots) else roots[number]


def _other(found: object) -> str:
    return "absent" if found is None else type(found).__name__


def _alias_violations(plan: GuardPlan, live: dict[int, Any]) -> Iterator[Violation]:
    """Names of one module that lead to several now."""
    for row in plan.modules:
        module = live.get(row.holder.number)
        guards = [guard for guard in row.guards if guard.kind is GuardKind.ALIASING]
        for guard, (parent, name) in zip(guards, row.holder.aliases, strict=True):
            above = live.get(parent)
            if module is None or above is None:
                continue
            held = above.__dict__["_modules"].get(name)
            if not isinstance(held, nn.Module) or seen_through(held) is not module:
                yield Violation(guard, "two modules")


def _guard_by_guard(row: HolderPlan, module: nn.Module, walk: Walk) -> Iterator[Violation]:
    for guard in row.guards:
        found = found_in_module(guard, module, walk) if guard.name else None
        if found is not None:
            yield Violation(guard, found)
    for guard in row.of_class:
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
    own = guard._replace(what=path, holder=row.holder.number)
    return Violation(own, shown(value))


def _object_violations(plan: GuardPlan, walk: Walk) -> Iterator[Violation]:
    """Objects that modules hold, each live one once for every object of the capture it stands for."""
    seen: set[tuple[int, int]] = set()
    for number, thing, path in walk.waiting:  # which grows while objects lead to others
        row = plan.holders[number]
        if (number, id(thing)) in seen or row.holder.is_found_by_name:
            continue
        seen.add((number, id(thing)))
        if isinstance(thing, nn.Module):
            yield from _guard_by_guard(row, thing, walk)
            continue
        for guard in row.guards:
            walk.at = f"{path}.{guard.name}"
            found = _found_in_object(guard, thing, walk)
            if found is not None:
                yield Violation(guard._replace(what=f"{path}.{guard.name}"), found)


def _found_in_object(guard: Guard, thing: object, walk: Walk) -> str | None:
    value = ask(thing, guard.name)
    if isinstance(value, Failed):
        return str(value)
    return found_in_place(guard.expected, value, walk)


def _class_violations(plan: GuardPlan, walk: Walk) -> Iterator[Violation]:
    """What classes hold, once for each class: another function under the name of a method, for one.

    What a capture in another thread has put there for its time is none.
    """
    for kind, guards in plan.classes.items():
        for guard in guards:
            value = without_patches(class_attribute(kind, guard.name))
            wanted = guard.expected
            is_it = isinstance(wanted, ExpectedFunction) and wanted.target is value
            if is_it and _looks_the_same(wanted, value):  # reloaders put other code into a function
                continue
            found = difference(guard.expected, value, walk)
            if found is not None:
                yield Violation(guard, found)


def _variable_violations(plan: GuardPlan, walk: Walk) -> Iterator[Violation]:
    """Globals, closures and environment variables that hold something else now."""
    for guard, row in plan.variables:
        if not row.way and isinstance(row.root, Unfound):
            continue  # a function of the capture that is not here, in whose place nothing can be
        now = without_patches(row.now())
        is_same = (now is row.value or now is without_patches(row.value)) and not _may_be_written(
            guard.expected, now
        )
        is_same = is_same and _looks_the_same(guard.expected, now)
        found = None if is_same else found_in_place(guard.expected, now, walk)
        if found is not None:
            yield Violation(guard, _LOST if isinstance(row.root, Unfound) else found)


_LOST = "where the file cannot say"


def _may_be_written(expected: Expectation, now: object) -> bool:
    """Whether something may hold something else now, or be met under another name, too."""
    return isinstance(now, list | dict | set | deque) or isinstance(expected, Snapshot | ExpectedThing)


def _looks_the_same(expected: Expectation, now: Any) -> bool:
    """Whether a function has the code and the defaults that it had, and a tensor its shape, and neither has
    attributes of somebody's; of anything else nothing is asked."""
    if isinstance(expected, ExpectedTensor):
        facts = expected.facts
        is_alike = now.shape == facts.shape and now.dtype is facts.dtype and now.device == facts.device
        return is_alike and not expected.attributes and not now.__dict__
    function = function_of(now) if isinstance(expected, ExpectedFunction) else None
    if function is None:
        return True
    is_same = expected.code == code_of(function[0])  # type: ignore[union-attr]
    return is_same and not is_marked(expected, function[0])  # type: ignore[arg-type]


def _gradient_hook_violations(plan: GuardPlan, walk: Walk, hookless: Hookless) -> Iterator[Violation]:
    """Hooks on parameters, of which a program with a backward has none: they change gradients."""
    has_hooks = has_gradient_hooks if hookless is None else gradient_hooks_before
    hooked = {number: tensor for number, tensor in walk.tensors.items() if has_hooks(tensor)}
    for guard in plan.guards if hooked and hookless != () else ():
        if hookless is not None and guard.what not in hookless:
            continue
        tensor = hooked.get(guard.expected.number) if isinstance(guard.expected, ExpectedTensor) else None
        if tensor is not None:
            what = f"gradient hooks of {guard.what}"
            none = guard._replace(what=what, kind=GuardKind.HOOKS, expected=Hooks())
            yield Violation(none, ", ".join(gradient_hooks(tensor)))

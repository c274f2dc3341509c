"""Does a captured program still stand for a model?"""

import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from whence import hierarchy
from whence.dependence.asking import Failed, attempt
from whence.dependence.describe import reference
from whence.dependence.observed import Left, Observed
from whence.errors import LostState, NotCallable, UsageError
from whence.guards import guards_of
from whence.guards.check import Checked, check_model
from whence.guards.guarded import Guarded, Ways
from whence.guards.inputs import input_violations, misfits, structure_guard
from whence.guards.memory import Remembered
from whence.program import FlatProgram
from whence.program.guards.expectations import (
    Entries,
    Expectation,
    ExpectedConstant,
    ExpectedFunction,
    ExpectedWords,
    Items,
)
from whence.program.guards.guards import Guards
from whence.program.guards.rows import Guard, Unguarded, Violation
from whence.program.names import NamedOnly
from whence.program.queries.same_operations import same_operations
from whence.program.state import bound_state
from whence.schema import GuardKind, OnViolation, OutputKind
from whence.tracing.reads.kept_changes import applied
from whence.tracing.sandbox.leftovers import probed
from whence.tracing.target.subject import subject_of, tensors_by_name

Capture = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], FlatProgram]


def guards_for(
    program: FlatProgram,
    observed: Observed,
    again: Callable[[], tuple[FlatProgram, Observed]],
    made: Sequence[Tensor] = (),
) -> Guards:
    """The guards of a capture, for which tensors were `made`.

    Raises `LostState` for a model whose next call would compute something else.
    Some models change in a run what they read in it: they install hooks, count, fill a cache or a config that
    they were given half empty. Such a model is captured once more as the run left it. Where it does the same,
    its guards then are as good as those before.
    """
    guards, left = guards_of(program, observed, made), observed.left
    is_in_part = program.step is not None or left.tensors  # a flag, and not the tensor that it speaks of
    leaves = () if is_in_part else tuple(left.constants())
    if not left:
        return replace(guards, leaves=leaves)

    def settled() -> tuple[Guards | None, Left]:
        second, seen = again()
        if not _stand_ins(second, left) and same_operations(program, second):
            return guards_of(second, seen, made), seen.left
        is_cache = left.tensors and not (left.varies or seen.left or _advances_any_of(second, left))
        if is_cache and left.of_state:  # which training changes: a cache that is filled holds other numbers
            return guards, seen.left
        return (guards_of(second, seen, (*left.tensors, *made)) if is_cache else None), seen.left

    with applied(left), warnings.catch_warnings(action="ignore"):  # they were given already
        found = attempt(settled)
    then, left_again = (None, left) if isinstance(found, Failed) else found
    if then is None or (left_again and _decides_by(program, left, again)):
        raise _computes_otherwise(program, left)
    if kept := [f"{path}: {', '.join(got)}" for path, got in left.kept if not _is_repeated(program, path)]:
        warnings.warn(
            f"the model kept tensors of the capture in {', '.join(kept)}; they are removed. A captured "
            "program does not repeat that: return them",
            stacklevel=4,
        )
    guards = guards if then is guards else _settled(guards, then, left_again)
    return guards if left_again else replace(guards, leaves=leaves)


def _is_repeated(program: FlatProgram, path: str) -> bool:
    """Whether a training step puts there what is kept, in every run."""
    effects = () if program.step is None else program.step.effects
    return any(row.place.path.startswith((f"{path}.", f"{path}[")) for row in effects)


def _settled(guards: Guards, then: Guards, left_again: Left) -> Guards:
    """Guards before and after the first run, without those on what every run changes and none decides by."""
    changing = {guard.what for guard in then if guard.what in then.changes and _is_probed(guard.expected)}
    filled = [] if left_again else guards.changes
    unguarded = (
        *(Unguarded(what, "every run changes it, and none decided by it") for what in sorted(changing)),
        *(
            Unguarded(f"numbers in {what}", "the first run fills it, and the program computes them in each")
            for what in filled
        ),
    )
    counting = {name for name in then.changes if left_again}
    kept = [
        replace(each, rows=tuple(_but_for(counting, row) for row in each if row.what not in changing))
        for each in (guards, then)
    ]
    return replace(kept[0], settled=kept[1], unguarded=(*guards.unguarded, *unguarded))


def _but_for(counting: Set[str], guard: Guard) -> Guard:
    """A guard without the attributes of a function that every run changes: it counts its calls there."""
    function = guard.expected
    if not isinstance(function, ExpectedFunction) or not function.attributes:
        return guard
    names = guard.what.rpartition(" ")[2], getattr(function.target, "__name__", "")
    attributes = tuple(
        (key, ExpectedWords("what every run changes"))
        if not counting.isdisjoint(f"{name}.{key}" for name in names) and _is_probed(held)
        else (key, held)
        for key, held in function.attributes
    )
    return guard._replace(expected=replace(function, attributes=attributes))


def _is_probed(expected: Expectation) -> bool:
    """Whether `probed` tells when such a value decides: a number, or how much a container holds."""
    return isinstance(expected, Items | Entries) or (
        isinstance(expected, ExpectedConstant) and type(expected.value) in (int, float, set)
    )


def _decides_by(program: FlatProgram, left: Left, again: Callable[[], tuple[FlatProgram, Observed]]) -> bool:
    """Whether a run decides something by numbers that every run changes, or fails with others."""
    asked = list[bool]()
    with applied(probed(left, lambda: asked.append(True))), warnings.catch_warnings(action="ignore"):
        found = attempt(again)
    return bool(asked) or isinstance(found, Failed) or not same_operations(program, found[0])


def _stand_ins(program: FlatProgram, left: Left) -> list[str]:
    """The state of a program that stands for tensors of a run."""
    tensors = {id(tensor) for tensor in left.tensors}
    return [name for name, tensor in program.state.items() if id(tensor) in tensors]


def _advances_any_of(program: FlatProgram, left: Left) -> bool:
    """Whether a program reads and changes what stands for a tensor of a run: a buffer that a run made."""
    written = {row.of for row in program.signature.outputs_of(OutputKind.MUTATION)}
    return any(name in written and program.node(name).users for name in _stand_ins(program, left))


def _computes_otherwise(program: FlatProgram, left: Left) -> LostState:
    return LostState(
        f"{program.name} changes {', '.join(left.names)} while it runs, and computes otherwise next time",
        where=left.place,
        why="a program changes parameters, buffers and arguments, and nothing else that Python holds: in its "
        "next call all of this would be as it was",
        remedy="keep a tensor in a buffer that __init__ registers, pass in or return anything else; where "
        "only the first calls are otherwise, run the model before the capture",
    )


def check(
    program: FlatProgram, model: object, args: object, kwargs: object, memory: Remembered | None = None
) -> Checked:
    """Every guard that does not hold for this model and, where they are given, these inputs.

    Where looking at what was given fails, that is what was found. Raises `UsageError` for a program that has
    no guards, or that was loaded without a model.
    """
    if not program.guards:
        raise UsageError(
            f"{program.name} has no guards: nobody watched what its graph assumes of the model",
            remedy="pass the arguments, which are compared with the graph's; whence.capture the model; "
            "or program.verify, which compares the numbers of any graph",
        )
    if any(issubclass(row.type, NamedOnly) for row in program.guards.holders):
        raise UsageError(
            f"{program.name} was loaded from a file, and its guards speak of classes and code by name",
            remedy="whence.load(path, model=...) with the model that is to be checked",
        )
    found = attempt(lambda: _check(program, model, (args, kwargs), memory))
    return Checked([Violation(program.guards[0], str(found))]) if isinstance(found, Failed) else found


def found_before(program: FlatProgram, model: object) -> tuple[tuple[str, str], ...]:
    """What guards of a later step find of a model that has not taken the first one."""
    return tuple((each.guard.what, each.found) for each in check(program, model, None, None).violations)


def violations_in_turn(program: FlatProgram, model: object, args: object, kwargs: object) -> list[Violation]:
    """Every guard that does not hold, but where it is the first step's turn, which the step itself takes."""
    found = check(program, model, args, kwargs).violations
    before = set(() if program.step is None else program.step.before)
    if not before <= {(each.guard.what, each.found) for each in found}:
        return found
    return [each for each in found if (each.guard.what, each.found) not in before]


def check_inputs(program: FlatProgram, args: object, kwargs: object) -> list[Violation]:
    """What would be refused of a call of a program that has no guards, of which only the inputs are known."""
    found = attempt(lambda: misfits(program.convention, () if args is None else args, kwargs))
    if isinstance(found, Failed):
        return [Violation(structure_guard(program.convention), str(found))]
    return found


def _check(
    program: FlatProgram, model: object, inputs: tuple[object, object], memory: Remembered | None
) -> Checked:
    (args, kwargs), plan = inputs, program.guards.plan
    hookless = None if program.has_backward else program.circumstances.differentiated
    hookless = hookless if program.step is None else ()  # a step runs hooks on gradients itself
    checked = check_model(plan, model, _roots(program, model), memory, hookless)
    checked.violations.extend(_replaced(program))
    if args is None and kwargs is None:
        return checked
    given = () if args is None else args
    violations = [*checked.violations, *input_violations(program.convention, plan, given, kwargs)]
    return replace(checked, violations=violations)


def _replaced(program: FlatProgram) -> Iterator[Violation]:
    """What a step finds another in the place of: optimizers and schedules, and their methods."""
    for row in () if program.step is None else program.step.replaced:
        guard = Guard(GuardKind.VARIABLE, row.path, reference(row.value), "the step calls it", row.path)
        yield Violation(guard, f"another {type(row.value).__name__}")


def _roots(program: FlatProgram, model: object) -> tuple[object, ...]:
    """The modules a callable reaches; a module is looked at as it is."""
    if not program.guards.plan.callables:
        return (model,)
    try:
        return tuple(module for _, module in subject_of(model).roots)
    except NotCallable:
        return ()


def guarded(program: FlatProgram, model: Any, on_violation: str, capture: Capture) -> Guarded:
    """A callable that checks before it runs; raises `UsageError` for an unknown `on_violation`, or a step."""
    hierarchy.refuse_step(program)
    if on_violation not in tuple(OnViolation):
        raise UsageError(
            f"on_violation cannot be {on_violation!r}",
            remedy=f"use {', '.join(map(repr, map(str, OnViolation)))}",
        )
    # no closures: a deep copy is about the copy of the model
    ways = Ways(partial(_checked_model, model), partial(_module, model), partial(capture, model))
    return Guarded(program, model, OnViolation(on_violation), ways)


def _checked_model(model: Any, current: FlatProgram, args: Any, kwargs: Any, memory: Remembered) -> Checked:
    return check(current, model, args, kwargs, memory)


def _module(model: Any, current: FlatProgram) -> Callable[..., Any]:
    state = bound_state(current, tensors_by_name(subject_of(model)))
    forward: Callable[..., Any] = hierarchy.flat_inside(
        current.with_changes(state=state, variants=())
    ).forward
    return forward

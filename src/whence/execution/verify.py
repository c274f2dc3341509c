"""Is the program the model, bit for bit?

Eager PyTorch is the oracle. Both run from the same seed on the same inputs and state; outputs, all gradients,
buffers, everything the run changes, and the random number generator's state are compared bit for bit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from whence import hierarchy
from whence._torch.graphs import own_copy
from whence._torch.observe.compile_flags import compiling_on_this_thread
from whence._torch.operators.table import said_of
from whence.errors import UsageError
from whence.execution.compare import Comparison, compare
from whence.execution.running import (
    Run,
    refuse_without_numbers,
    run_eager,
    run_module,
    same_start,
    seed_of_its_way,
)
from whence.execution.values.first import by_call, first_unequal
from whence.program import FlatProgram
from whence.program.arguments.variants import alone
from whence.program.node_records import place_of
from whence.program.plain import AsJSON, plain_fields
from whence.program.queries.notebook import opening_html
from whence.program.state import bound_state, refuse_elsewhere, state_of_loss
from whence.schema import InputKind
from whence.tracing.answers import told_to
from whence.tracing.target.eligibility import refuse_uninitialised
from whence.tracing.target.subject import subject_of, tensors_by_name

aten = torch.ops.aten


@dataclass(frozen=True)
class Verification(AsJSON):
    """The comparisons, one row each, and what is known about the first difference.

    `divergence` names the first module call whose result differs. `asked` are the lines where the model
    asked whether it is being compiled; `explained` is true when the program equals eager bit for bit once
    eager is told that it is: the difference is then the model's own choice. It never makes `ok` true.
    `uninitialised` says where memory of `torch.empty` is read before anybody wrote it, and what that reaches:
    eager itself gives other numbers there in every run. `unlike` is what the model asks of an argument and
    the copy that eager runs on answers otherwise (`x._version`): then nothing is known. `close` says whether
    all is within `atol`, where one was given; it never makes `ok` true, either.
    """

    rows: tuple[Comparison, ...]
    divergence: str | None = None
    asked: tuple[str, ...] = ()
    explained: bool = False
    uninitialised: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    atol: float | None = None

    @property
    def close(self) -> bool | None:
        """Whether every value is equal, or differs by no more than `atol`; None where nobody gave one."""
        return None if self.atol is None else all(map(self._is_close, self.rows))

    def _is_close(self, row: Comparison) -> bool:
        return row.equal or (row.difference is not None and row.difference <= (self.atol or 0.0))

    @property
    def ok(self) -> bool:
        """Whether every comparison was bitwise equal, with eager on what is like the arguments."""
        return not self.unlike and all(row.equal for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        told = plain_fields(self, "ok", "rows", "divergence", "asked", "explained", "uninitialised", "unlike")
        return told if self.atol is None else {**told, "atol": self.atol, "close": self.close}

    def _repr_html_(self) -> str:
        return opening_html(str(self).splitlines()[-1], str(self))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def verify(
    program: FlatProgram,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    by: str | None = None,
) -> Verification:
    """Compare `program` with `model` on these inputs; the model, its gradients and all seeds are left as
    they were. `by` "call" compares what each call returns, and the gradient of that, too.

    Raises `CallError` when the inputs do not fit the capture.
    """
    if program.loss_function is not None and not torch.is_grad_enabled():
        raise _without_gradients(program)
    subject = subject_of(model)
    refuse_uninitialised(subject)
    inputs = (args, kwargs or {})
    refuse_without_numbers(subject, inputs)
    bound = alone(program).with_changes(state=bound_state(program, tensors_by_name(subject)))
    untold = replace(bound.convention, questions=())  # copies answer some otherwise, in eager, too
    bound = bound.with_changes(convention=untold)
    refuse_elsewhere(bound)
    program.convention.flatten(*inputs)
    names = [row.name for row in bound.signature.state if row.kind is InputKind.CONSTANT]
    names += [row.name for row in state_of_loss(bound) if row.name not in names]
    constants = tuple(bound.state[name] for name in names if name in bound.state)

    def run(work: Callable[[tuple[Any, Any]], Any], seed: int | None = None) -> Any:
        with same_start(subject, inputs, constants, begins if seed is None else seed) as given:
            return work(given)

    def run_program(bound: FlatProgram, seed: int | None = None) -> Run:
        found: Run = run(lambda given: run_module(hierarchy.flat_inside(bound), bound, *given), seed)
        return found

    begins = seed_of_its_way(program, partial(run_program, bound))
    eager = run(lambda given: run_eager(program, subject, *given))
    unlike = run(partial(_answered_otherwise, program)) if program.convention.questions else ()

    around = program.circumstances
    may_ask = around.asked or around.is_foreign or around.strict

    def run_told() -> Run:
        # nobody noted who asks where others trace: all is told
        answers = compiling_on_this_thread(told_to(around.asked) if around.asked else lambda: True)
        found: Run = run(lambda given: run_eager(program, subject, *given, answers=answers))
        return found

    calls = partial(by_call, bound, subject, run)
    told = run_told if may_ask else None
    if unlike:
        return replace(compared(bound, eager, run_program, told), unlike=unlike)
    found = compared(bound, eager, run_program, told, lambda: first_unequal(calls()))
    return with_calls(found, calls()) if by else found


def _answered_otherwise(program: FlatProgram, given: tuple[Any, Any]) -> tuple[str, ...]:
    """What copies of the arguments answer otherwise than these, as the program takes them."""
    return tuple(row.words for row in program.convention.faults(*given))


def refuse_unknown(by: str | None, atol: float | None = None) -> None:
    """Raises `UsageError` for other ways to compare than those there are, and for what is no distance."""
    if by not in (None, "call"):
        raise UsageError(f"nothing is compared by {by!r}", remedy='leave it out, or give by="call"')
    if atol is not None and not 0 <= atol < math.inf:
        raise UsageError(f"atol={atol} is no distance", remedy="give a number, 0 or more")


def with_calls(found: Verification, calls: Iterable[Comparison]) -> Verification:
    """What each call returns, and its gradient, too; the first that differs is the divergence.

    The gradient of a parameter that both found unequal is one row, which says where it differs.
    """
    rows = tuple(calls)
    told = {row.name: row for row in rows if row.kind == "gradient" and not row.equal}
    before = [_with_culprit(row, told) for row in found.rows]
    others = [row for row in rows if row.kind != "gradient" or row.name in told]
    return replace(found, rows=(*before, *others), divergence=found.divergence or first_unequal(rows))


def _with_culprit(row: Comparison, told: dict[str, Comparison]) -> Comparison:
    if row.kind != "gradient" or row.equal or row.name not in told:
        return row
    return replace(row, differs_in=told.pop(row.name).differs_in)


def _without_gradients(program: FlatProgram) -> UsageError:
    return UsageError(
        f"the program of {program.name} has a loss, and gradients are off",
        why="eager, which it is compared with, has no backward where autograd records nothing",
        remedy="call verify with gradients on",
    )


def compared(
    program: FlatProgram,
    eager: Run,
    run_program: Callable[[FlatProgram], Run],
    told: Callable[[], Run] | None,
    divergence: Callable[[], str | None] = lambda: None,
) -> Verification:
    """What was run in eager and what a program gives; `told` runs eager that is told that it is compiled."""
    captured = run_program(program)
    rows, uninitialised = compare(eager, captured), uninitialised_reads(program, run_program)
    if all(row.equal for row in rows):
        return Verification(rows, uninitialised=uninitialised)
    explained = told is not None and all(row.equal for row in compare(told(), captured))
    return Verification(rows, divergence(), tuple(map(str, program.asked)), explained, uninitialised)


def _lines(result: Verification) -> Sequence[str]:
    counts: dict[str, list[Comparison]] = {}
    for row in result.rows:
        counts.setdefault(row.kind, []).append(row)
    lines = [_summary(kind, rows) for kind, rows in counts.items()]
    lines += [f"  {row}" for row in result.rows if not row.equal][:20]
    lines += [f"first module that differs: {result.divergence}"] if result.divergence else []
    if result.explained and not result.asked:
        lines.append("eager that is told that it is compiled, as torch.export says, is equal, bit for bit")
    if result.asked:
        outcome = "equal, bit for bit" if result.explained else "still different"
        lines += [f"the model asks whether it is being compiled; eager that is told so is {outcome}:"]
        lines += [f"  {line}" for line in result.asked[:5]]
    if result.uninitialised:
        lines.append("memory of torch.empty is read before it is written, and is other numbers in every run:")
        lines += [f"  {line}" for line in result.uninitialised[:5]]
    if result.unlike:
        lines.append("the model asks of an argument what its copy answers otherwise:")
        lines += [f"  {line}" for line in result.unlike[:5]]
    if result.close is not None and not result.ok:
        lines.append(f"{'all' if result.close else 'not all'} within {result.atol:g}")
    return [*lines, _verdict(result)]


def _verdict(result: Verification) -> str:
    if result.unlike:
        return "NOT known: eager ran on copies that are not as the arguments are"
    if not result.ok:
        return "NOT bitwise equal to eager"
    if any(row.kind == "gradient" for row in result.rows):
        return "outputs and all gradients are bitwise equal to eager"
    return "outputs are bitwise equal to eager"


def _summary(kind: str, rows: Sequence[Comparison]) -> str:
    equal = sum(row.equal for row in rows)
    return f"{kind:<10} {equal} of {len(rows)} bitwise equal"


def uninitialised_reads(program: FlatProgram, run: Callable[[FlatProgram], Run]) -> tuple[str, ...]:
    """Where a program takes memory that is read before it is written, and what that reaches.

    Whether all of it is written first, piece by piece, no graph says. So the program is run with one number
    in that memory, and with another.
    """
    names = [node.name for node in program.graph.nodes if said_of(node.target).gives_memory and node.users]
    if not names or not _difference_reached(program, names, run):
        return ()
    reached = {name: _difference_reached(program, [name], run) for name in names}
    return tuple(_reach_in_words(program, name, found) for name, found in reached.items() if found)


def _difference_reached(
    program: FlatProgram, names: Sequence[str], run: Callable[[FlatProgram], Run]
) -> list[str]:
    """What differs when other numbers lie in the memory that these nodes give."""
    rows = compare(run(_with_memory(program, names, 1)), run(_with_memory(program, names, torch.nan)))
    return [f"{row.kind} {row.name}" for row in rows if not row.equal]


def _with_memory(program: FlatProgram, names: Sequence[str], number: float) -> FlatProgram:
    module = own_copy(program.graph_module)
    for node in [node for node in module.graph.nodes if node.name in names]:
        dtype = node.meta["val"].dtype
        held = number if dtype.is_floating_point or dtype.is_complex else int(number == 1)
        with module.graph.inserting_before(node):
            given = module.graph.node_copy(node, lambda source: source)
        node.target, node.args, node.kwargs = aten.fill.Scalar, (given, held), {}
    return program.with_changes(graph_module=module)


def _reach_in_words(program: FlatProgram, name: str, reached: Sequence[str]) -> str:
    return f"{name} ({place_of(program.node(name))}) reaches {', '.join(reached)}"

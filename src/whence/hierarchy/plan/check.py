"""Prove a plan before it is emitted.

Each body is walked in its order: every value must be there before it is read, every node must run exactly
once, and everything a call hands out must exist. A region that was not convex could not pass. A body that
several calls share is walked once; each of them must hold as many nodes as it runs.
"""

from collections import Counter
from collections.abc import Iterator

from whence._torch.graphs import value_inputs
from whence.errors import MalformedProgram
from whence.hierarchy.plan.plan import Body, Plan, Region
from whence.schema import Phase


def check(plan: Plan) -> None:
    """Raise `MalformedProgram` naming every fault of the plan."""
    faults = [
        *_coverage_faults(plan),
        *(fault for number in plan.distinct for fault in _order_faults(plan, number)),
    ]
    if faults:
        raise MalformedProgram(
            "the plan of the tree is wrong",
            why="; ".join(faults[:10]),
            remedy="this is a mistake of ours: please report it",
        )


def _coverage_faults(plan: Plan) -> Iterator[str]:
    placed: Counter[str] = Counter()
    held: dict[Region, int] = {}
    for number in plan.distinct:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            steps = [step for step in plan.body(phase, number).steps if isinstance(step, str)]
            placed.update(steps)
            held[phase, number] = len(steps)
    for name, (_, number) in plan.regions.items():
        if plan.first[number] == number and placed[name] != 1:
            yield f"{name} runs {placed[name]} times"
    for (phase, number), count in Counter(plan.regions.values()).items():
        first = plan.first[number]
        if first != number and held[phase, first] != count:
            yield f"{plan.site(number)} ({phase.value}) holds {count} nodes, and runs {held[phase, first]}"


def _order_faults(plan: Plan, number: int) -> Iterator[str]:
    call = plan.calls[number]
    yield from _body_faults(plan, Phase.FORWARD, call.forward, number)
    if call.backward is not None:
        yield from _body_faults(plan, Phase.BACKWARD, call.backward, number)


def _body_faults(plan: Plan, phase: Phase, body: Body, number: int) -> Iterator[str]:
    site = str(plan.site(number)) or "(root)"
    present = {*body.inputs, *(name for name, _ in body.reads)}
    if phase is Phase.BACKWARD:
        present |= set(body.kept)
    for step in body.steps:
        missing = _needs(plan, phase, step) - present
        if missing:
            yield f"{site} ({phase.value}): {step} runs before {', '.join(sorted(missing))}"
        present |= {step} if isinstance(step, str) else {*plan.gives(phase, step)}
    wanted = {*body.outputs, *(body.kept if phase is Phase.FORWARD else ())}
    if phase is Phase.FORWARD:
        wanted -= {row.name for row in plan.program.signature.inputs}
    if wanted - present:
        yield f"{site} ({phase.value}): hands out {', '.join(sorted(wanted - present))} without having it"


def _needs(plan: Plan, phase: Phase, step: str | int) -> set[str]:
    if isinstance(step, str):
        return {source.name for source in value_inputs(plan.nodes[step])}
    return {*plan.takes(phase, step)}

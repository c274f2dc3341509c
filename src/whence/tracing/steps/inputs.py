"""What a step takes beside its arguments and the model's tensors: each becomes an input of the program.

Of the optimizer these are its state, and in the groups tensors, learning rates, other numbers that steps
advance, and momenta that a schedule moves together with the rate (`OneCycleLR` notes in the groups that it
does so; what it moves is `betas[0]` of Adam's kin, or `momentum`). Of the model they are gradients of before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from whence._torch.subclasses.wrapper_subclasses import plain_parts
from whence.errors import UnsupportedStep
from whence.program.arguments.optimizer_arguments import (
    EVERYWHERE,
    OWN,
    CycledSlot,
    GroupSlot,
    Setting,
    StateSlot,
    home_of,
    put_inside,
)
from whence.program.names import as_name
from whence.program.signature import Part
from whence.schema import InputKind
from whence.tracing.steps.first_step import StateBefore, StepAssumptions
from whence.tracing.steps.host.memory import refuse_alias
from whence.tracing.steps.optimizer import RATE, OptimizerEntry, Optimizing
from whence.tracing.steps.session import StepInput, StepSession
from whence.tracing.target.subject import StateTensor, plain_tensors

_NOTED = "max_momentum"


@dataclass(frozen=True)
class Taken:
    """The optimizer's inputs: their rows, and where in the optimizer each is; and what there was before."""

    rows: tuple[StepInput, ...]
    states: tuple[tuple[StateSlot, OptimizerEntry], ...]
    groups: tuple[GroupSlot, ...]
    before: StateBefore
    settings: tuple[Setting, ...]
    empty: tuple[tuple[str, str], ...]
    cycled: tuple[CycledSlot, ...]
    twins: tuple[Tensor, ...] = ()


def take_inputs(session: StepSession, found: Optimizing, wish: StepAssumptions) -> Taken:
    """Placeholders for the state of the optimizer, and for what its groups hold."""
    _begin(session, found, wish)
    before = found.entries(wish.advanced)
    held = [entry for entry in before if entry.value is not None]
    states = [(_slot(entry, wish), entry, _state_input(session, entry, found)) for entry in held]
    groups = list(_in_groups(session, found, wish))
    moved = [] if wish.fixed_rates else list(_cycled(session, found))
    return Taken(
        rows=(*(row for *_, row in states), *(row for _, row in groups), *(row for _, row in moved)),
        states=tuple((replace(slot, input=node.name), entry) for slot, entry, (_, node) in states),
        groups=tuple(slot for slot, _ in groups),
        before=StateBefore(
            {entry.place: entry.kind for entry in before},
            {row.place: row.path for row in found.pieces()},
            found.frames(),
            {home: home in wish.touched for home in found.touched()},
        ),
        settings=tuple(found.settings()),
        empty=tuple((entry.home.owner, entry.way[0]) for entry in before if entry.value is None),
        cycled=tuple(slot for slot, _ in moved),
    )


def beginnings(found: Taken) -> Iterator[tuple[fx.Node, Tensor]]:
    """The tensors that a first step makes, each with its input."""
    nodes = {row.name: node for row, node in found.rows}
    for slot, _ in found.states:
        if slot.initial is not None and slot.initial.like is not None:
            yield nodes[slot.input], slot.initial.made()


def gradients_of_before(session: StepSession) -> Iterator[StepInput]:
    """Inputs for the gradients that parameters and buffers have."""
    memory = [row.tensor for row in plain_tensors(session.run.subject.state)]
    for row in session.run.subject.state:
        if row.tensor.is_leaf and row.tensor.grad is not None:
            _refuse_followed(row.tensor.grad, f"the gradient of {row.paths[0]}")
            inputs = [*_gradient_inputs(session, row, row.tensor.grad, memory)]
            session.step.taken[id(row.tensor)] = tuple(node for _, node in inputs)
            yield from inputs


def _gradient_inputs(
    session: StepSession, row: StateTensor, gradient: Tensor, memory: list[Tensor]
) -> Iterator[StepInput]:
    """An input for a gradient, or for each tensor that it is made of."""
    path = f"{row.paths[0]}.grad"
    for access, tensor in plain_parts(gradient):
        refuse_alias(tensor, memory, f"the gradient of {row.paths[0]}")
        node = session.recorder.adopt(tensor, "_".join(["s", *row.paths[0], "grad", *access]))
        inside = ".".join(access)
        part = Part.of(path, gradient, inside) if access else None
        name = ".".join([path, *access])
        yield session.input_row(
            node, name, said=f"the gradient {path}", of=row, kind=InputKind.STEP_STATE, part=part
        )


def _refuse_followed(gradient: Tensor, name: str) -> None:
    """Raise `UnsupportedStep` for a gradient with a history: no input has one."""
    if gradient.requires_grad:
        raise UnsupportedStep(
            f"{name} requires a gradient itself when the step begins",
            why="it was changed where gradients are on, with something that requires one: autograd follows "
            "it from step to step, and a program is one step",
            remedy="change gradients under torch.no_grad(), or clear them before the step",
        )


def _begin(session: StepSession, found: Optimizing, wish: StepAssumptions) -> None:
    """Give the optimizer the state that its first step makes, as fake tensors."""
    tensors = found.tensors
    for (home, way), initial in wish.created.items():
        like = initial.like
        made = initial.value if like is None else session.recorder.fresh([like])[0]
        counter = wish.counts.get((home, way))
        put_inside(home.begun(found.optimizer, tensors), way, made if counter is None else counter.begins)
    for home in wish.touched:
        home.begun(found.optimizer, tensors)


def _slot(held: OptimizerEntry, wish: StepAssumptions) -> StateSlot:
    counter = wish.counts.get(held.place)
    initial = wish.created.get(held.place) if counter is None else counter.initial
    key, *within = held.way
    return StateSlot("", held.home.owner, key, initial, tuple(within), held.home.member)


def _state_input(session: StepSession, held: OptimizerEntry, found: Optimizing) -> StepInput:
    row, said = held.parameter, f"the optimizer's {held.path}"
    owner = ("state",) if held.home.owner == EVERYWHERE else () if row is None else row.paths[0]
    name = "_".join(["o", *owner, str(held.way[0])])
    if held.is_inside:
        name = session.log.free_name("_".join([name, *map(as_name, map(str, held.way[1:]))]))
    if isinstance(held.value, Tensor):
        node = session.recorder.adopt(held.value, name)
        return session.input_row(node, held.path, said=said, of=row, part=held.part)
    number, made = session.number_input(name, held.path, held.value, said=said, of=row)
    tensors = {} if row is None else {held.home.owner: row.tensor}
    put_inside(held.home.pieces(found.optimizer, tensors), held.way, number)
    session.step.counting.inputs[held.path] = made[1]
    return made


def _in_groups(
    session: StepSession, found: Optimizing, wish: StepAssumptions
) -> Iterator[tuple[GroupSlot, StepInput]]:
    """Inputs for learning rates, for tensors in groups, and for other numbers that steps advance there."""
    for setting in found.settings():
        if setting.is_beginning or setting.group == OWN:
            continue
        if isinstance(setting.value, Tensor):
            node = session.recorder.adopt(setting.value, _name_of(setting))
            yield GroupSlot(node.name, setting.group, setting.key), session.input_row(node, setting.path)
        elif setting.key == RATE and isinstance(setting.value, float) and not wish.fixed_rates:
            row = _number(session, found, setting)
            session.step.rates.add(row[1])
            yield GroupSlot(row[1].name, setting.group, setting.key), row
    for (group, key), counter in wish.numbers.items():
        begins = home_of(found.optimizer, group)[key] if counter.after is None else counter.begins
        row = _number(session, found, Setting(group, key, begins))
        yield GroupSlot(row[1].name, group, key, counter.initial), row


def _number(session: StepSession, found: Optimizing, setting: Setting) -> StepInput:
    """An input for a number, which takes its place."""
    number, row = session.number_input(_name_of(setting), setting.path, setting.value)
    home_of(found.optimizer, setting.group)[setting.key] = number
    session.step.counting.inputs[setting.path] = row[1]
    return row


def _name_of(setting: Setting) -> str:
    of_group = "" if setting.group == OWN else f"param_groups_{setting.group}_"
    return f"o_{of_group}{setting.key}"


def _cycled(session: StepSession, found: Optimizing) -> Iterator[tuple[CycledSlot, StepInput]]:
    """An input for each momentum that a schedule moves, put in its place in the optimizer."""
    for number, group in enumerate(found.optimizer.param_groups if found.optimizer else ()):
        key = next((key for key in ("betas", "momentum") if key in group and _NOTED in group), None)
        if key is None:
            continue
        held = group[key]
        value, rest = (held[0], tuple(held[1:])) if isinstance(held, tuple | list) else (held, None)
        if type(value) is not float:
            continue
        slot, name = CycledSlot("", number, key, rest), _name_of(Setting(number, key, value))
        recorded: Any
        recorded, row = session.number_input(name if rest is None else f"{name}_0", slot.path, value)
        group[key] = recorded if rest is None else (recorded, *rest)
        session.step.cycled.add(row[1])
        yield replace(slot, input=row[1].name), row

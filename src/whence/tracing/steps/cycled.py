"""Momenta that a schedule moves together with the learning rate: inputs, as the rate is.

`OneCycleLR` notes in the groups that it does so; what it moves is `betas[0]` of Adam's kin, or `momentum`.
"""

from collections.abc import Iterator

from torch import fx

from whence.program.arguments.optimizer_arguments import CycledSlot
from whence.program.signature import Input
from whence.schema import InputKind
from whence.tracing.log.events import InputNamed
from whence.tracing.steps.optimizer import Optimizing
from whence.tracing.steps.session import StepSession

_NOTED = "max_momentum"


def cycled(session: StepSession, found: Optimizing) -> Iterator[tuple[CycledSlot, Input, fx.Node]]:
    """An input for each momentum that a schedule moves, put in its place in the optimizer."""
    for number, group in enumerate(found.optimizer.param_groups if found.optimizer else ()):
        key = next((key for key in ("betas", "momentum") if key in group and _NOTED in group), None)
        if key is None:
            continue
        held = group[key]
        value, rest = (held[0], tuple(held[1:])) if isinstance(held, tuple | list) else (held, None)
        if type(value) is not float:
            continue
        name = f"o_param_groups_{number}_{key}"
        recorded, node = session.recorder.number_input(name if rest is None else f"{name}_0")
        group[key] = recorded if rest is None else (recorded, *rest)
        slot = CycledSlot(node.name, number, key, rest)
        session.step.counting.known[node] = value
        session.step.cycled.add(node)
        session.log.add(InputNamed(node, slot.path))
        yield slot, Input(node.name, InputKind.OPTIMIZER_STATE, slot.path, value=value), node

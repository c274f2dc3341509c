"""What a run of a training step takes for given, found out in the runs before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whence.program.arguments.optimizer_arguments import Initial
from whence.tracing.replay.reuse import Reuse
from whence.tracing.steps.counters import Counter, GroupKey
from whence.tracing.steps.host.around import HostAssumptions
from whence.tracing.steps.host.operations import Operations
from whence.tracing.steps.optimizer import Key


@dataclass(frozen=True)
class StepAssumptions:
    """What a run takes for given: state that a first step would make, and whether learning rates are inputs.

    `counts` and `numbers` are numbers that steps advance, in the state and in the groups, `advanced` those in
    containers and objects of the state; `owned` are attributes of the optimizer that it changes. `operations`
    are those of the optimizer in the run before, which this one must repeat. `host` is what the step changes
    around it. A step that `takes_gradients` reads those of before. `reuse` says which calls may be replayed.
    """

    created: Mapping[Key, Initial] = field(default_factory=dict)
    counts: Mapping[Key, Counter] = field(default_factory=dict)
    numbers: Mapping[GroupKey, Counter] = field(default_factory=dict)
    advanced: frozenset[Key] = frozenset()
    owned: frozenset[str] = frozenset()
    operations: Operations | None = None
    fixed_rates: bool = False
    takes_gradients: bool = False
    host: HostAssumptions = field(default_factory=HostAssumptions)
    reuse: Reuse = field(default_factory=lambda: Reuse(joint=True))

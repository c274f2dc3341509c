"""What is kept of a recorded call, of its rehearsed backward, and of each call that it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, fx

from whence._torch.autograd.nodes import GradientKey
from whence._torch.graphs import NameCounts
from whence.dependence.observed import Read
from whence.dependence.tensor_facts import AllFacts
from whence.provenance import ModulePath, Source
from whence.tracing.attribution.gradient_edges import GradientSums
from whence.tracing.log.log import Log
from whence.tracing.replay.records.likeness import Conditions
from whence.tracing.replay.records.watched_call import Border, Counts, Outcome, Start


@dataclass(frozen=True, eq=False)
class Template:
    """A recorded call that stands for others like it.

    Its operations lie between two markers in the graph, that of its `start` and `border`, which reads what
    crossed its border, inputs before outputs, so that it follows what becomes of them. `scopes` are the
    numbers of its call and of the calls inside it. `names` and `functions` say how many names of each base,
    and calls of each torch function, it used; `keys` where the gradients of values that modules exchanged
    are collected, `noted` at which inputs that was known; `asked` which questions to tensors are
    its own, `contiguous` which values it made so that were so already.
    """

    conditions: Conditions
    inside: Border
    outcome: Outcome
    start: Start
    border: fx.Node
    scopes: range
    names: NameCounts
    functions: Counts
    keys: Mapping[fx.Node, GradientKey]
    noted: frozenset[int]
    recorded: tuple[fx.Node, ...]
    asked: slice
    contiguous: slice
    caller: Source | None
    reads: tuple[Read, ...]
    rehearsals: dict[tuple[AllFacts | None, ...], "Rehearsal"] = field(default_factory=dict)

    @property
    def kind(self) -> type:
        """The class of the module that was called."""
        return type(self.conditions.module)

    @property
    def moment(self) -> int:
        """When autograd began on it."""
        return self.start.moment

    @cached_property
    def differentiable_outputs(self) -> list[int]:
        """The positions of outputs that have a gradient."""
        return [i for i, (_, tensor) in enumerate(self.inside.outputs) if tensor.requires_grad]

    @cached_property
    def differentiable_inputs(self) -> list[int]:
        """The positions of inputs that have a gradient."""
        return [i for i, (_, tensor) in enumerate(self.inside.inputs) if tensor.requires_grad]

    @cached_property
    def read_by_caller(self) -> list[bool]:
        """Of each read, whether it was at the line that made the call."""
        return [read.source == self.caller for read in self.reads]

    @cached_property
    def readers(self) -> frozenset[ModulePath | None]:
        """The modules that read something."""
        return frozenset(read.module for read in self.reads)

    @cached_property
    def nodes(self) -> frozenset[fx.Node]:
        """What was recorded, and the marker behind it."""
        return frozenset((*self.recorded, self.border))

    @cached_property
    def given_out(self) -> frozenset[fx.Node]:
        """The nodes of its results."""
        return frozenset(node for node, _ in self.inside.outputs)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The backward of a recorded call for gradients of certain shapes and layouts.

    `tangents` are the placeholders of these gradients (None where an output got none). What was recorded lies
    between the nodes `begin` and `border`; `arrivals` gives for each input the gradients that reached it,
    which `border` reads: what the nodes `read` hold there.
    """

    tangents: tuple[fx.Node | None, ...]
    log: Log
    gradients: GradientSums
    arrivals: Mapping[int, tuple["Arriving", ...]]
    begin: fx.Node
    border: fx.Node
    read: tuple[fx.Node, ...]
    names: NameCounts


@dataclass(frozen=True)
class Arriving:
    """A gradient that reaches an input: positions in what the rehearsal's border reads, and the calls it is
    from.

    `value` is the gradient by itself, `sum` the sum that it became a part of, None for the first; such a sum
    comes before the node recorded `at` that position, in its `turn` among others there. `like` and `total`
    are their fake values.
    """

    value: int
    sum: int | None
    scopes: tuple[int, ...]
    at: int
    turn: int
    like: Tensor
    total: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Application:
    """A call that a template stands for. `scopes` are the numbers of its calls.

    `node` stands for it in the graph, and reads what the nodes `given` hold there. `slots` says for each
    gradient that autograd asks it for which input it is for and the how manieth, `keys` where it goes,
    `output_keys` where those of its results are collected. `starts` and `called` are the counts of names and
    of calls of torch functions when it began, and `left_out` bare names that were left to it. `backwards` are
    its backward in the capture, and in rehearsals of what is around it.
    """

    template: Template
    node: fx.Node
    given: tuple[fx.Node, ...]
    scopes: range
    starts: NameCounts
    called: Counts
    caller: Source | None
    slots: tuple[tuple[int, int], ...]
    keys: tuple[GradientKey | None, ...]
    left_out: frozenset[str]
    output_keys: Mapping[int, GradientKey]
    backwards: list["Differentiated"] = field(default_factory=list)

    @property
    def all_left_out(self) -> frozenset[str]:
        """Also those that were left to its backwards."""
        return self.left_out.union(*(each.left_out for each in self.backwards))


@dataclass(frozen=True, eq=False)
class Differentiated:
    """The backward of such a call, `node` in the graph, noted in `log`.

    `returned` says for each of its results which arrival at which input it is; of inputs that are `whole` it
    is the sum of all arrivals. `left_out` are bare names that were left to it.
    """

    rehearsal: Rehearsal
    node: fx.Node
    returned: tuple[tuple[int, int], ...]
    whole: frozenset[int]
    starts: NameCounts
    log: Log
    left_out: set[str]

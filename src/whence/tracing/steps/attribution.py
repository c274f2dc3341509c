"""An origin for every node of a recorded step.

Forward and backward are attributed as in a joint capture, one pass of autograd after the other. What puts a
gradient into `.grad`, and what the optimizer computes, belongs to the module whose parameter it is about,
where that is certain: what it writes is that parameter, its gradient or its state, or it reads nothing else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from whence._torch.operators.schemas import written_nodes
from whence.program.node_records import set_origin
from whence.provenance import CallSite, ModulePath, Origin
from whence.schema import Phase
from whence.tracing.attribution.attribution import attribute_rest, attribute_steps, seen
from whence.tracing.attribution.gradient_edges import GradientSums, follow
from whence.tracing.log.log import Log, first_of_each_moment
from whence.tracing.steps.notes import StepNotes
from whence.tracing.steps.run import RecordedStep

Owner = fx.Node | None
"""The placeholder of a parameter; None for what is nobody's, or several parameters'."""


def attribute_step(recorded: RecordedStep, step: StepNotes) -> GradientSums:
    """Write an origin on every recorded node; return the gradients that values were given, those of the last
    pass of autograd where several reached one."""
    log = recorded.session.log
    sites = log.sites
    for node in log.order:
        if log.marks[node].phase is not Phase.BACKWARD:
            set_origin(node, seen(sites, log, node))
    makers = first_of_each_moment(log)
    since, found = 0, GradientSums()
    for run in step.runs:
        own = run.part_of(log)
        gradients = follow(own, run.roots, run.start)
        attribute_steps(own, sites, gradients, makers)
        attribute_rest(own, sites, gradients, since=since)
        since = run.end
        found = GradientSums({**found.arrivals, **gradients.arrivals}, {**found.sums, **gradients.sums})
    for rehearsal in recorded.session.replay.records.rehearsals():
        attribute_steps(rehearsal.log, sites, rehearsal.gradients, makers)
    calls = _calls(recorded)
    for node, owner in _owners(recorded, step):
        mark = log.marks[node]
        named = calls.get(owner, ()) if owner is not None else ()
        set_origin(node, Origin(mark.phase, named, source=mark.source, hook=mark.hook))
    return found


def _calls(recorded: RecordedStep) -> dict[fx.Node, tuple[CallSite, ...]]:
    """For each parameter the first call of its module, or of the nearest around it that was called."""
    first: dict[ModulePath, CallSite] = {}
    for scope in recorded.session.log.scopes[1:]:
        first.setdefault(scope.site.path, scope.site)
    rows = recorded.prepared.state
    return {node: tuple(_around(first, row.paths[0].parent)) for row, node in rows}


def _around(first: Mapping[ModulePath, CallSite], path: ModulePath) -> Iterator[CallSite]:
    found = [first[above] for above in path.prefixes() if above in first]
    yield from found[-1:]


def _owners(recorded: RecordedStep, step: StepNotes) -> Iterator[tuple[fx.Node, Owner]]:
    """Every operation that keeps a gradient or follows the backward outside modules, and its parameter."""
    log = recorded.session.log
    parameters = {str(row.paths[0]): node for row, node in recorded.prepared.state}
    known = _Owners(log, {node: node for node in parameters.values()}, set(step.rates))
    known.owner |= {node: parameters[row.of] for row, node in recorded.rows if row.of is not None}
    known.owner |= {node: step.leaves.get(leaf) for node, leaf in log.kept.items()}
    for node in log.order:
        if node in log.kept:
            yield node, known.owner[node]
        elif log.marks[node].phase is Phase.OPTIMIZER:
            yield node, known.of(node)


@dataclass
class _Owners:
    """Whose the values are that were looked at; `neutral` are learning rates, and what is made of them."""

    log: Log
    owner: dict[fx.Node, Owner]
    neutral: set[fx.Node]

    def of(self, node: fx.Node) -> Owner:
        """Whose an operation is: what it writes decides, or else all that it reads."""
        written = written_nodes(node)
        sources = [source for source in written or node.all_input_nodes if source not in self.neutral]
        if not sources and node.all_input_nodes:
            self.neutral.add(node)
        owners = {self.owner.get(source) for source in sources}
        found = owners.pop() if len(owners) == 1 else None
        self.owner[node] = found
        return found

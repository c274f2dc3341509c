"""An origin for every node of a recorded step.

Forward and backward are attributed as in a joint capture, one pass of autograd after the other. What puts a
gradient into `.grad`, and what the optimizer computes, belongs to the module whose parameter it is about,
where that is certain: what it writes is that parameter, its gradient or its state, or it reads nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from whence._torch.operators.schemas import written_nodes
from whence.program.node_records import set_origin
from whence.provenance import CallSite, ModulePath, Origin
from whence.schema import Phase
from whence.tracing.assembling.attribution import attribute_rest, attribute_steps, seen
from whence.tracing.attribution.gradient_edges import GradientSums, follow
from whence.tracing.log.log import first_of_each_moment
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
    calls = _first_calls(recorded)
    for node, owner in _owners(recorded, step):
        mark = log.marks[node]
        named = calls.get(owner, ()) if owner is not None else ()
        set_origin(node, Origin(mark.phase, named, source=mark.source, hook=mark.hook))
    return found


def _first_calls(recorded: RecordedStep) -> dict[fx.Node, tuple[CallSite, ...]]:
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
    parameters |= {whole.path: whole.nodes[0] for whole in recorded.prepared.wholes}
    known: dict[fx.Node, Owner] = {
        **{node: node for node in parameters.values()},
        **{node: parameters[row.of] for row, node in recorded.rows if row.of is not None},
        **{node: step.leaves.get(leaf) for node, leaf in log.kept.items()},
    }
    neutral = set(step.rates)  # learning rates, and what is made of them
    for node in log.order:
        if log.marks[node].phase is Phase.OPTIMIZER and node not in log.kept:
            sources = [each for each in written_nodes(node) or node.all_input_nodes if each not in neutral]
            if not sources and node.all_input_nodes:
                neutral.add(node)
            known[node] = _owner_of(sources, known)
        if node in log.kept or log.marks[node].phase is Phase.OPTIMIZER:
            yield node, known[node]


def _owner_of(sources: Sequence[fx.Node], known: Mapping[fx.Node, Owner]) -> Owner:
    """Whose an operation is that writes these values or, where it writes none, reads them."""
    owners = {known.get(source) for source in sources}
    return owners.pop() if len(owners) == 1 else None

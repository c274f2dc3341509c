"""From the log of a run to an origin for every node, and the gradient of every value that a module
exchanged.

Forward nodes were recorded inside a scope. A node of autograd's graph belongs to the innermost call that
was running when it was made, and everything recorded while it runs is its backward. What is recorded
between one autograd node and the next are sums: one for each outgoing edge, in order, whose target already
holds a gradient.
"""

from collections.abc import Mapping, Sequence

from torch import fx
from torch.autograd.graph import Node

from whence._torch.autograd.nodes import derivative_of_its_own, nodes_below, sequence_number
from whence._torch.operators.schemas import brings_derivative
from whence._torch.record.annotations import annotate_like
from whence.program.node_records import set_origin
from whence.provenance import CallSite, Origin
from whence.provenance.places import PROGRAM
from whence.schema import Phase, Quality
from whence.tracing.attribution.gradient_edges import GradientSums, Sum, follow
from whence.tracing.log.events import Stepped
from whence.tracing.log.log import Log, first_of_each_moment, maker_of
from whence.tracing.recording.run import Recorded
from whence.tracing.replay.differentiating import is_stand_in


def attribute(recorded: Recorded) -> GradientSums:
    """Write an origin on every recorded node; return the gradients that values were given."""
    log = recorded.session.log
    sites = log.sites
    for node in log.order:
        if log.marks[node].phase is Phase.FORWARD:
            set_origin(node, seen(sites, log, node))
    roots = [(log.keys.get(value), tangent) for value, tangent in recorded.backward.roots]
    gradients = follow(log, roots, _seed_end(log, recorded))
    makers = first_of_each_moment(log)
    attribute_steps(log, sites, gradients, makers)
    attribute_rest(log, sites, gradients)
    for rehearsal in recorded.session.replay.records.rehearsals():
        attribute_steps(rehearsal.log, sites, rehearsal.gradients, makers)
    return gradients


def attribute_steps(
    log: Log, sites: Sequence[CallSite], gradients: GradientSums, makers: Mapping[int, fx.Node]
) -> None:
    """Write an origin on everything that autograd's nodes recorded, and on the sums between them."""
    for step in log.steps:
        for node in log.order[step.start : step.end]:
            set_origin(node, _of_step(sites, log, step, node, makers))
            annotate_like(node, maker_of(step.node, makers))
    for node, total in gradients.sums.items():
        set_origin(node, _of_sum(sites, total))


def custom_functions(results: Sequence[Node]) -> dict[int, str]:
    """What has a derivative of its own among what leads to `results`, by the moment it was applied."""
    return {
        number: name
        for node in nodes_below(results)
        if (name := derivative_of_its_own(node))
        and not is_stand_in(node)
        and (number := sequence_number(node)) is not None
    }


def without_operators(functions: Mapping[int, str], log: Log) -> dict[int, str]:
    """The custom functions without operators: those carry their derivative wherever they run."""
    makers = first_of_each_moment(log)
    return {
        moment: name
        for moment, name in functions.items()
        if moment not in makers or not brings_derivative(makers[moment].target)
    }


def _site(sites: Sequence[CallSite], scope: int) -> tuple[CallSite, ...]:
    return (sites[scope],) if scope != PROGRAM else ()


def _place(sites: Sequence[CallSite], scope: int) -> CallSite | None:
    return sites[scope] if scope != PROGRAM else None


def seen(sites: Sequence[CallSite], log: Log, node: fx.Node) -> Origin:
    """The origin of an operation that ran while its call did."""
    mark = log.marks[node]
    place = _place(sites, mark.scope)
    return Origin(
        mark.phase, _site(sites, mark.scope), mark.quality, mark.source, place=place, hook=mark.hook
    )


def _of_step(
    sites: Sequence[CallSite], log: Log, step: Stepped, node: fx.Node, makers: Mapping[int, fx.Node]
) -> Origin:
    mark = log.marks[node]
    maker = maker_of(step.node, makers)
    scope = mark.scope if mark.recomputed else log.scope_of(step.node)
    source = mark.source or (log.marks[maker].source if maker else None)
    return Origin(
        Phase.BACKWARD,
        _site(sites, scope),
        log.marks[maker].quality if maker else Quality.EXACT,
        source,
        forward=maker.name if maker else None,
        place=_place(sites, scope),
        recomputed=mark.recomputed,
        hook=mark.hook,
    )


def _of_sum(sites: Sequence[CallSite], total: Sum) -> Origin:
    calls = tuple(dict.fromkeys(sites[scope] for scope in total.contributors if scope != PROGRAM))
    return Origin(Phase.BACKWARD, calls, Quality.ACCUMULATED, place=_place(sites, total.place))


def attribute_rest(log: Log, sites: Sequence[CallSite], gradients: GradientSums, *, since: int = 0) -> None:
    """What autograd recorded between its nodes and is no sum: the seed, and what hooks on tensors computed.

    A hook on a tensor runs right before the autograd node that made the tensor, so it is given to that node's
    call; that is a deduction, and says so.
    """
    inside = {index for step in log.steps for index in range(step.start, step.end)}
    for index, node in enumerate(log.order[since:], since):
        mark = log.marks[node]
        if mark.phase is not Phase.BACKWARD or index in inside or node in gradients.sums:
            continue
        if node in log.kept:
            continue
        following = next((step for step in log.steps if step.start >= index), None)
        is_seed = mark.hook is None and (following is log.steps[0] if log.steps else True)
        scope = PROGRAM if is_seed or following is None else log.scope_of(following.node)
        quality = Quality.EXACT if is_seed else Quality.INFERRED
        place = _place(sites, scope)
        origin = Origin(
            Phase.BACKWARD, _site(sites, scope), quality, mark.source, place=place, hook=mark.hook
        )
        set_origin(node, origin)


def _seed_end(log: Log, recorded: Recorded) -> int:
    """The position after the seed of the loss, if there is one."""
    seeds = [tangent for _, tangent in recorded.backward.roots if tangent.op != "placeholder"]
    return log.order.index(seeds[-1]) + 1 if seeds else _backward_start(log)


def _backward_start(log: Log) -> int:
    backward = (index for index, node in enumerate(log.order) if log.marks[node].phase is Phase.BACKWARD)
    return next(backward, len(log.order))

"""From the log of a run to an origin for every node, and the gradient of every value that a module
exchanged.

Forward nodes were recorded inside a scope. A node of autograd's graph belongs to the innermost call that
was running when it was made, and everything recorded while it runs is its backward. What is recorded
between one autograd node and the next are sums: one for each outgoing edge, in order, whose target already
holds a gradient.
"""

from collections.abc import Mapping, Sequence

from torch import fx, nn
from torch.autograd.graph import Node

from whence._torch.autograd.calls_not_run import is_stand_in
from whence._torch.autograd.nodes import derivative_of_its_own, nodes_below, sequence_number
from whence._torch.graphs import nested_graph
from whence._torch.higher_order.function_graphs import stop_playing
from whence._torch.operators.schemas import HigherOrderOperator, brings_derivative, op_name
from whence._torch.record.annotations import annotate_like
from whence.errors import Place, UnmatchedRecomputation
from whence.program.node_records import has_origin, origin_of, set_origin
from whence.provenance import CallSite, Origin
from whence.provenance.places import PROGRAM
from whence.rewriting.functionalize import Functional
from whence.schema import Phase, Quality
from whence.tracing.attribution.gradient_edges import GradientSums, Sum, follow
from whence.tracing.log.events import Stepped
from whence.tracing.log.log import Log, first_of_each_moment, maker_of
from whence.tracing.recording.run import Recorded

Redraws = Mapping[fx.Node, fx.Node | None]


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


def _call_of_scope(sites: Sequence[CallSite], scope: int) -> CallSite | None:
    return sites[scope] if scope != PROGRAM else None


def seen(sites: Sequence[CallSite], log: Log, node: fx.Node) -> Origin:
    """The origin of an operation that ran while its call did."""
    mark = log.marks[node]
    place = _call_of_scope(sites, mark.scope)
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
        place=_call_of_scope(sites, scope),
        recomputed=mark.recomputed,
        hook=mark.hook,
    )


def _of_sum(sites: Sequence[CallSite], total: Sum) -> Origin:
    calls = tuple(dict.fromkeys(sites[scope] for scope in total.contributors if scope != PROGRAM))
    return Origin(Phase.BACKWARD, calls, Quality.ACCUMULATED, place=_call_of_scope(sites, total.place))


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
        place = _call_of_scope(sites, scope)
        origin = Origin(
            Phase.BACKWARD, _site(sites, scope), quality, mark.source, place=place, hook=mark.hook
        )
        set_origin(node, origin)


def _seed_end(log: Log, recorded: Recorded) -> int:
    seeds = [tangent for _, tangent in recorded.backward.roots if tangent.op != "placeholder"]
    return log.order.index(seeds[-1]) + 1 if seeds else _backward_start(log)


def _backward_start(log: Log) -> int:
    backward = (index for index, node in enumerate(log.order) if log.marks[node].phase is Phase.BACKWARD)
    return next(backward, len(log.order))


def attribute_branches(graph: fx.Graph, nested: nn.Module) -> None:
    """Give what functions compute to the call that runs the operator, with an origin where it has none."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        origin = origin_of(node)
        for reader in node.all_input_nodes:
            if (inner := nested_graph(reader, nested)) is not None:
                set_origin(reader, origin)
                stop_playing(inner)
                _attribute_inside(inner.graph, origin)
                attribute_branches(inner.graph, inner)


def _attribute_inside(graph: fx.Graph, of: Origin) -> None:
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if has_origin(node) and origin_of(node).phase is of.phase:
            set_origin(node, origin_of(node)._replace(place=of.place))
        else:
            set_origin(node, of._replace(quality=Quality.INFERRED))


def reuse_random_draws(functional: Functional, redraws: Redraws) -> frozenset[fx.Node]:
    """Let every repeated draw read the result of the one it repeats; returns the draws that may go.

    Eager rewinds the random number generator for a checkpoint that runs its forward again. This gives the
    same numbers, and the same state of the generator afterwards.
    """
    pairs = [
        (again, first)
        for again, first in redraws.items()
        if first is not None and first.target is again.target
    ]
    if len(pairs) < len(redraws):
        raise _unmatched([node for node in redraws if node not in dict(pairs)])
    for again, first in pairs:
        now = functional.value_of(again)
        now.replace_all_uses_with(functional.value_of(_first(redraws, first)))
    repeated = {*redraws}
    return frozenset(repeated | {made for made, source in functional.sources.items() if source in repeated})


def _first(redraws: Redraws, node: fx.Node) -> fx.Node:
    """The draw at the start of a chain: a checkpoint inside a checkpoint repeats a repetition."""
    while (before := redraws.get(node)) is not None:
        node = before
    return node


def _unmatched(draws: Sequence[fx.Node]) -> UnmatchedRecomputation:
    origin = origin_of(draws[0])
    names = ", ".join(dict.fromkeys(op_name(node.target) for node in draws))
    return UnmatchedRecomputation(
        f"a recomputed {names} cannot be matched with the draw it repeats",
        where=Place(
            str(origin.place) if origin.place else None, str(origin.source) if origin.source else None
        ),
        why="the checkpoint did not draw the same random numbers the second time as the first",
        remedy="let the region draw alike each time it runs, or turn checkpointing off for the capture",
    )

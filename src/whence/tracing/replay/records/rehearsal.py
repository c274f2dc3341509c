"""Run the backward of a recorded call apart from everything else, to know what it will be."""

from collections.abc import Iterator, Sequence

from torch import Tensor, fx

from whence._torch.autograd.nodes import gradient_key, run_part_of_backward
from whence._torch.graphs import NameCounts, separately_named
from whence._torch.sizes.symbols import without_decisions
from whence.dependence.tensor_facts import facts_of
from whence.tracing.attribution.gradient_edges import Arrival, GradientSums, follow
from whence.tracing.listening.recording import Recording
from whence.tracing.replay.records.markers import Markers
from whence.tracing.replay.records.template import Arriving, Rehearsal, Template


def rehearsal_for(
    recording: Recording, markers: Markers, template: Template, tangents: Sequence[Tensor | None]
) -> Rehearsal:
    """The backward of a recorded call for gradients like these; rehearsed for the first of their kind.

    `tangents` are the gradients of the outputs that can have one, None where there is none.
    """
    key = tuple(None if tangent is None else facts_of(tangent)[1:6] for tangent in tangents)
    if key not in template.rehearsals:
        template.rehearsals[key] = rehearsed(recording, markers, template, tangents)
    return template.rehearsals[key]


def rehearsed(
    recording: Recording, markers: Markers, template: Template, likes: Sequence[Tensor | None]
) -> Rehearsal:
    """Run the backward of a recorded call on gradients like these; everything else is as before
    afterwards."""
    inputs = [template.inside.inputs[i][1] for i in template.differentiable_inputs]
    outputs = [template.inside.outputs[i][1] for i in template.differentiable_outputs]
    begin = markers.put()
    undecided = without_decisions(recording.recorder.environment)
    with undecided, separately_named(recording.recorder.graph), recording.run.running.forked() as log:
        twins = [None if like is None else recording.recorder.stand_in_placeholder(like) for like in likes]
        pairs = [(output, *twin) for output, twin in zip(outputs, twins, strict=True) if twin is not None]
        roots = [(gradient_key(output), node) for output, node, _ in pairs]
        recording.run.running.pass_begins([key for key, _ in roots])
        # what is replayed inside hands each of its gradients on by itself: an input may hold one already
        recording.run.running.arrived.update(filter(None, map(gradient_key, inputs)))
        given, gradients = [output for output, _, _ in pairs], [twin for _, _, twin in pairs]
        run_part_of_backward(given, inputs, gradients, recording.passes, since=template.moment)
        followed = follow(log, roots, 0)
        names = NameCounts.now(recording.recorder.graph)
    read: list[fx.Node] = []
    arrivals = {
        position: tuple(_arriving(arrival, read) for arrival in arrivals)
        for position, arrivals in _arrivals(template, followed)
    }
    return Rehearsal(
        tangents=tuple(None if twin is None else twin[0] for twin in twins),
        log=log,
        gradients=followed,
        arrivals=arrivals,
        begin=begin,
        border=markers.put(*read),
        read=tuple(read),
        names=names.since(NameCounts({})),
    )


def _arrivals(template: Template, gradients: GradientSums) -> Iterator[tuple[int, Sequence[Arrival]]]:
    """The gradients that reached each input."""
    for position in template.differentiable_inputs:
        key = gradient_key(template.inside.inputs[position][1])
        yield position, gradients.arrivals.get(key, []) if key is not None else []


def _arriving(arrival: Arrival, read: list[fx.Node]) -> Arriving:
    """A gradient that reached an input; the nodes that hold it and its sum are added to `read`."""
    total, value = arrival.sum or arrival.node, len(read)
    read += [arrival.node] if arrival.sum is None else [arrival.node, arrival.sum]
    return Arriving(
        value=value,
        sum=None if arrival.sum is None else value + 1,
        scopes=arrival.scopes,
        at=arrival.at,
        turn=arrival.turn,
        like=arrival.node.meta["val"],
        total=total.meta["val"],
    )

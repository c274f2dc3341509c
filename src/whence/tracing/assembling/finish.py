"""What was recorded and attributed → a Program."""

from dataclasses import replace

from whence._torch.sizes.symbols import without_decisions
from whence.program import Program
from whence.program.replay import known_of
from whence.rewriting.functionalize import functionalize
from whence.tracing.assembling.assemble import assemble
from whence.tracing.assembling.size_rules import with_sizes
from whence.tracing.attribution.attribution import attribute_branches
from whence.tracing.attribution.gradient_edges import GradientSums
from whence.tracing.recording.run import Recorded
from whence.tracing.replay.records.expand import expand
from whence.tracing.target.example import Example


def finished(example: Example, recorded: Recorded, gradients: GradientSums) -> Program:
    """The program of an attributed run; raises `Doubt` where a record cannot be used after all."""
    session = recorded.session
    recorder = session.recorder
    attribute_branches(recorder.graph, recorder.nested)
    with without_decisions(recorder.environment):  # recorded writes have decided already
        functional = functionalize(recorder.graph, recorder.sizes)
    exchanged = expand(session.replay.records, session.log, functional, gradients)
    program = assemble(session.run.subject, example, recorded, functional, exchanged)
    program = with_sizes(program, example, recorded)
    known = known_of(program.graph, exchanged.copies)
    return program.with_changes(replay=replace(program.replay, known=known))

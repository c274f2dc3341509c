"""What the parts that listen to one run have in common."""

from dataclasses import dataclass

from whence.tracing.answers import Answers
from whence.tracing.attribution.stopped_gradients import Cuts
from whence.tracing.listening.call_names import CallNames
from whence.tracing.listening.marking import Marking
from whence.tracing.listening.places import Places
from whence.tracing.listening.running import Running
from whence.tracing.log.log import Log
from whence.tracing.objections import Objections
from whence.tracing.reads.attribute_reads import Reads
from whence.tracing.reads.nondeterminism import ImpureCalls
from whence.tracing.reuse import Reuse
from whence.tracing.sandbox.hook_lines import Watch
from whence.tracing.sandbox.module_snapshot import Lines
from whence.tracing.sandbox.random_states import RandomStates
from whence.tracing.sandbox.undo import Interrupts
from whence.tracing.source_lines import SourceFinder
from whence.tracing.target.subject import Subject


@dataclass(frozen=True)
class RunState:
    """Where a run is and what it has met, each kept by a part that knows nothing of the others' work."""

    subject: Subject
    answers: Answers
    interrupts: Interrupts
    running: Running
    places: Places
    objections: Objections
    reads: Reads
    grad_modes: Cuts
    random_states: RandomStates
    watch: Watch
    marking: Marking
    names: CallNames

    @property
    def log(self) -> Log:
        """Where everything is written down now."""
        return self.running.log


def run_state(
    subject: Subject, finder: SourceFinder, lines: Lines, interrupts: Interrupts, reuse: Reuse
) -> RunState:
    """The state of a run that is about to begin."""
    running, objections = Running(subject.name), Objections(reuse)
    places = Places(running, finder, reuse.answers)
    reads = Reads(subject, lines, places.reading, finder.is_user, ImpureCalls(finder.is_user, places.line))
    grad_modes = Cuts()
    watch = Watch(subject, finder, lines, objections.unfit)
    return RunState(
        subject=subject,
        answers=reuse.answers,
        interrupts=interrupts,
        running=running,
        places=places,
        objections=objections,
        reads=reads,
        grad_modes=grad_modes,
        random_states=RandomStates(subject.name, places.here, objections.distrust),
        watch=watch,
        marking=Marking(running, finder, grad_modes, watch),
        names=CallNames(subject),
    )

"""The parts of replay, put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from whence._torch.function_tracer import FunctionTracer
from whence.tracing.listening.recording import Recording
from whence.tracing.replay.records.markers import Markers
from whence.tracing.replay.records.records import Records
from whence.tracing.replay.replayer import Replayer
from whence.tracing.replay.stand_ins import StandInWriter
from whence.tracing.replay.trials import Trials
from whence.tracing.reuse import Reuse


@dataclass(frozen=True)
class Replay:
    """Who decides, who watches, who writes, and what has been recorded."""

    recording: Recording
    records: Records
    replayer: Replayer
    trials: Trials
    stand_ins: StandInWriter

    def check(self, returned: Sequence[fx.Node | None]) -> None:
        """Raise `Doubt` where a record was used for what it does not stand for."""
        self.recording.run.objections.check()
        self.records.check(returned, self.recording.log.marks)

    def forget(self) -> None:
        """Let go of all tensors of the run."""
        self.recording.run.objections.release()
        self.records.forget()
        self.replayer.forget()


def replay_of(recording: Recording, reuse: Reuse, functions: FunctionTracer) -> Replay:
    """The replay of one recording."""
    records, replayer = Records(Markers(recording.recorder)), Replayer(recording, reuse)
    trials = Trials(recording, records, functions, replayer.learn, reuse.joint)
    return Replay(recording, records, replayer, trials, StandInWriter(recording, records, reuse.joint))

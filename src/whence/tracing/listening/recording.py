"""What is being recorded, and how far it has come."""

from dataclasses import dataclass

from whence._torch.record.recorder import Recorder
from whence.tracing.listening.run_state import RunState
from whence.tracing.listening.running import Passes
from whence.tracing.listening.tensors import RunTensors
from whence.tracing.log.log import Log


@dataclass(frozen=True)
class Recording:
    """A recording of a run: its state, the graph, its tensors, and who hears autograd."""

    run: RunState
    recorder: Recorder
    tensors: RunTensors
    passes: Passes

    @property
    def log(self) -> Log:
        """What has happened."""
        return self.run.running.log

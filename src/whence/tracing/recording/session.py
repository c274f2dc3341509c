"""Everything that listens while a model runs, put together."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import fx

from whence._torch.elsewhere.recorder import recorder_for
from whence._torch.elsewhere.target import Elsewhere
from whence._torch.fakes import FakeTensorMode
from whence._torch.function_tracer import FunctionTracer
from whence._torch.record.recorder import Recorder
from whence.tracing.listening.branches import Branches
from whence.tracing.listening.model_acts import ModelActs
from whence.tracing.listening.operations import Operations
from whence.tracing.listening.recording import Recording
from whence.tracing.listening.run_state import RunState
from whence.tracing.listening.running import Passes
from whence.tracing.listening.tensors import RunTensors
from whence.tracing.recording.module_calls import ModuleCalls
from whence.tracing.replay.replay import Replay, replay_of
from whence.tracing.reuse import Reuse


@dataclass(frozen=True)
class Session(Recording):
    """One run on one thread: its state, its recording, and who hears it."""

    branches: Branches
    replay: Replay
    calls: ModuleCalls

    fills_gradients = False

    def is_plainly_eager(self) -> bool:
        """Whether nobody is told that a capture goes on."""
        return False

    def forget(self) -> dict[fx.Node, type]:
        """Let go of every tensor of the run; what replayed calls computed, with the class they were of."""
        replayed = self.replay.records.inside_templates()
        self.tensors.forget()
        self.log.forget()
        self.replay.forget()
        self.branches.forget()
        self.recorder.forget()
        return replayed

    def end(self) -> None:
        """Let go of each other. Who hears a run knows who else does, in circles that Python's collector finds
        late: until then the model would stay, when nobody else holds it any more. Autograd's nodes, which
        also know, it never finds."""
        self.forget()
        recorder = self.recorder
        self.run.reads.reachable.sources.end()
        if recorder.environment is not None:
            recorder.environment.end()
        for each in (self.run.reads, recorder.tracer, recorder.listener, recorder.sizes):
            if each is not None:
                vars(each).clear()

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """An error that leaves the block ends the session."""
        with ExitStack() as ending:
            ending.callback(self.end)
            yield
            ending.pop_all()


def new_session(
    run: RunState,
    mode: FakeTensorMode,
    names: Mapping[int, str],
    reuse: Reuse,
    *,
    own_gradients: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Session:
    """What hears the run of a model; `names` are those of tensors that may turn up."""
    branches, functions = Branches(run, differentiates=reuse.joint), FunctionTracer()
    recorder = recorder_for(
        elsewhere,
        Recorder,
        lambda recorder: Operations(run, recorder, ModelActs(run, recorder, branches), names),
        mode,
        keeps_composites=reuse.composites,
        is_joint=reuse.joint,
        functions=functions,
    )
    tensors, passes = RunTensors(run, recorder, branches), Passes(run.running, recorder, own_gradients)
    replay = replay_of(Recording(run, recorder, tensors, passes), reuse, functions)
    calls = ModuleCalls(run, tensors, branches, replay, recorder.watching_functions)
    return Session(run, recorder, tensors, passes, branches, replay, calls)

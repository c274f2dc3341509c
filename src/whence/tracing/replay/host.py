"""What a replayer needs of the capture that is going on."""

from contextlib import AbstractContextManager
from types import CodeType
from typing import Protocol

from torch import Tensor, fx

from whence._torch.autograd.grad_modes import GradModes
from whence._torch.autograd.nodes import BackwardListener, GradientKey
from whence._torch.record.recorder import Recorder
from whence.provenance import ModulePath, Source
from whence.schema import Phase
from whence.tracing.reads.attribute_reads import Reads
from whence.tracing.recording.call_names import CallNames
from whence.tracing.recording.notes import Notes


class ReplayHost(BackwardListener, Protocol):
    """The capture that is going on. `arrived` are the places that hold a gradient already."""

    notes: Notes
    recorder: Recorder
    names: CallNames
    reads: Reads
    phase: Phase
    arrived: set[GradientKey]

    @property
    def grad_modes(self) -> GradModes:
        """What the model itself has done to the grad mode."""

    def apart(self) -> AbstractContextManager[Notes]:
        """A context in which what is recorded is noted apart."""

    def known(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; where its gradient is collected is noted."""

    def met(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor."""

    def reading(self) -> tuple[ModulePath | None, Source | None]:
        """The module that is running, and the user's line."""

    def is_user(self, code: CodeType) -> bool:
        """Whether code is the user's."""

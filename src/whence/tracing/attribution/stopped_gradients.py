"""Where gradients stop because the model turned the grad mode off."""

from dataclasses import dataclass

from torch import is_grad_enabled

from whence._torch.autograd.grad_modes import GradModes
from whence._torch.autograd.mode_questions import INFERENCE, mode_now
from whence._torch.autograd.nodes import inside_custom_function


@dataclass
class Cuts(GradModes):
    """The grad modes of a run that records gradients, or does not."""

    @property
    def stops(self) -> bool:
        """Whether gradients stop here in every run, because the model has turned them off."""
        return self.is_off or ((self.records or self.is_on) and not is_grad_enabled())

    @property
    def starts(self) -> bool:
        """Whether gradients are recorded here in every run, because the model has turned them on."""
        return self.is_on and is_grad_enabled()

    def is_caller_s(self, mode: str) -> bool:
        """Whether a mode that code asks for now is that of who called the model."""
        if mode == INFERENCE:
            return mode_now(INFERENCE) == self.infers
        return not (self.is_on or self.is_off or inside_custom_function())

    @property
    def is_unknown(self) -> bool:
        """Whether nobody knows what gradients do here: the backward of a custom function, which is not made
        where nothing is recorded anyway."""
        return not self.records and not is_grad_enabled() and inside_custom_function()

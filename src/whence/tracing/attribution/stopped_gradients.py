"""Where gradients stop because the model turned the grad mode off."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import fx

from whence._torch.autograd.grad_modes import GradModes
from whence._torch.autograd.nodes import inside_custom_function


@dataclass
class Cuts(GradModes):
    """The grad modes of a run that records gradients, or does not."""

    @property
    def stops(self) -> bool:
        """Whether gradients stop here in every run, because the model has turned them off."""
        return self.is_off or ((self.records or self.is_on) and not torch.is_grad_enabled())

    @property
    def starts(self) -> bool:
        """Whether gradients are recorded here in every run, because the model has turned them on."""
        return self.is_on and torch.is_grad_enabled()

    def cut(self, node: fx.Node, hooks: MutableMapping[str, None]) -> tuple[fx.Node, ...]:
        """The arguments of an operation whose gradients stop there.

        Where nothing is recorded anyway only what the model itself turned off counts; and nobody knows the
        backward of a custom function, which `hooks` is told.
        """
        if torch.is_grad_enabled():
            return ()
        if not self.records and inside_custom_function():
            hooks["a custom autograd function, where gradients were off"] = None
            return ()
        return tuple(node.all_input_nodes) if self.stops else ()

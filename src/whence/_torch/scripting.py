"""Tell TorchScript's objects apart: the methods of a scripted module are of a private type."""

import torch


def is_scripted(value: object) -> bool:
    """Whether `value` is a scripted module, function or method."""
    return isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction | torch._C.ScriptMethod)

"""Tell TorchScript's objects apart: the methods of a scripted module are of a private type."""

import torch


def is_packed_weight(value: object) -> bool:
    """Whether `value` is a quantised weight in the form of one backend: an object behind TorchScript."""
    return isinstance(value, torch.ScriptObject) and ".quantized." in value._type().qualified_name()


def is_scripted(value: object) -> bool:
    """Whether `value` is a scripted module, function or method."""
    return isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction | torch._C.ScriptMethod)

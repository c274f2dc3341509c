"""Tell TorchScript's objects apart: the methods of a scripted module are of a private type."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from whence._torch.versions.opaque import is_opaque

BEGIN_REGION = torch.ops.profiler._record_function_enter_new.default
END_REGION = torch.ops.profiler._record_function_exit._RecordFunction
"""What a profiler is told of a region with a name, which is no part of what is computed."""


def is_packed_weight(value: object) -> bool:
    """Whether `value` is a quantised weight in the form of one backend: an object behind TorchScript."""
    return isinstance(value, torch.ScriptObject) and ".quantized." in value._type().qualified_name()


_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction, torch._C.ScriptMethod)


def is_scripted(value: object) -> bool:
    """Whether `value` is a scripted module, function or method."""
    return isinstance(value, _SCRIPTED)


def is_script_object(value: object) -> bool:
    """Whether `value` is an object of a class of TorchScript's, which Python cannot look into."""
    return isinstance(value, torch.ScriptObject)


@cache
def takes_objects(target: OpOverload) -> bool:
    """Whether an operator has an argument for a generator, or for an object that is no tensor."""
    types = [argument.type for argument in target._schema.arguments]
    return any(kind.kind() in _OBJECTS or "Generator" in str(kind) for kind in types)


_OBJECTS = ("ClassType", "PyObjectType")


def object_among(values: Iterable[Any]) -> Any:
    """The first generator, script object, or object of an opaque class; None where there is none.

    Objects of a class that was registered with `typ="value"` are constants, and none of these.
    """
    return next((value for value in values if _is_object(value)), None)


def _is_object(value: object) -> bool:
    known = isinstance(value, torch.Generator | torch.ScriptObject)
    return known or is_opaque(type(value))

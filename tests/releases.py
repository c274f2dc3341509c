"""What tests spell otherwise in PyTorch's releases, in one place."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

_SINCE_14 = torch.__version__ >= "2.14"

OpaqueBase: Any = (
    import_module("torch._custom_class_base").CustomClassBase
    if _SINCE_14
    else import_module("torch._opaque_base").OpaqueBase
)
"""The base of classes whose objects operators take, and nobody looks into."""
OPAQUE, CONSTANT = ("symbolic", "constant") if _SINCE_14 else ("reference", "value")
"""How such classes are registered."""
SCRIPT_IS_DEPRECATED = FutureWarning if _SINCE_14 else DeprecationWarning
"""What TorchScript warns with."""

needs_script_classes = pytest.mark.skipif(
    not Path(torch.__file__).with_name("lib").joinpath("libtorchbind_test.so").exists(),
    reason="this build of PyTorch comes without its library of script classes for tests",
)

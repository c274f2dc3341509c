"""A captured program: hold it, select from it, print it, know whether it is well formed."""

from whence.program.arguments.convention import Convention
from whence.program.calls import Absent, Call, Calls, Constant, Named, Structure
from whence.program.layers import Layers
from whence.program.program import Adjoint, Contribution, ModuleRecord, Program, Wanted, Whole
from whence.program.signature import Input, Output, Part, Signature

__all__ = [
    "Absent",
    "Adjoint",
    "Call",
    "Calls",
    "Constant",
    "Contribution",
    "Convention",
    "Input",
    "Layers",
    "ModuleRecord",
    "Named",
    "Output",
    "Part",
    "Program",
    "Signature",
    "Structure",
    "Wanted",
    "Whole",
]

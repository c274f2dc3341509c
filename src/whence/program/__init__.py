"""A captured program: hold it, select from it, print it, know whether it is well formed."""

from whence.program.arguments.convention import Convention
from whence.program.arguments.fitting import InputQuery, ModeQuery
from whence.program.calls import Absent, Call, Calls, Constant, Named, Structure
from whence.program.layers import Layers
from whence.program.node_records import Adjoint, Contribution, GraphFacts
from whence.program.program import Circumstances, FlatProgram, ModuleRecord
from whence.program.queries.decisions import DecisionByValue
from whence.program.signature import Draw, Input, Output, Part, Signature, Whole

__all__ = [
    "Absent",
    "Adjoint",
    "Call",
    "Calls",
    "Circumstances",
    "Constant",
    "Contribution",
    "Convention",
    "DecisionByValue",
    "Draw",
    "FlatProgram",
    "GraphFacts",
    "Input",
    "InputQuery",
    "Layers",
    "ModeQuery",
    "ModuleRecord",
    "Named",
    "Output",
    "Part",
    "Signature",
    "Structure",
    "Whole",
]

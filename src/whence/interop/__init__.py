"""Other people's graphs and formats, in and out."""

from whence.interop.adapting import adapted
from whence.interop.attached import attach
from whence.interop.exported import from_exported_program
from whence.interop.exporting import to_exported_program
from whence.interop.strict import strict_program
from whence.interop.telling import GraphWords

__all__ = [
    "GraphWords",
    "adapted",
    "attach",
    "from_exported_program",
    "strict_program",
    "to_exported_program",
]

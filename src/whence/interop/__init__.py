"""Other people's graphs and formats, in and out."""

from whence.interop.archive.cache import Cache, key_of, late_modules
from whence.interop.archive.cache import option_faults as cache_faults
from whence.interop.archive.saved import bytes_of, content_of, program_of, saved_to
from whence.interop.attached.attach import attach
from whence.interop.attached.roles import GraphWords
from whence.interop.exported.read import from_exported_program
from whence.interop.exported.signature import adapted
from whence.interop.out.export import to_exported_program
from whence.interop.strict import strict_program

__all__ = [
    "Cache",
    "GraphWords",
    "adapted",
    "attach",
    "bytes_of",
    "cache_faults",
    "content_of",
    "from_exported_program",
    "key_of",
    "late_modules",
    "program_of",
    "saved_to",
    "strict_program",
    "to_exported_program",
]

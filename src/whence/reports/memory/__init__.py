"""What memory a program takes: what is kept, the peak, and what recomputing saves."""

from whence.reports.memory.recomputing import recomputing_of
from whence.reports.memory.storages import Storages, measured_if
from whence.reports.memory.taken import Memory, memory_in, memory_of

__all__ = ["Memory", "Storages", "measured_if", "memory_in", "memory_of", "recomputing_of"]

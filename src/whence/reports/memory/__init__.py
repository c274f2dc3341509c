"""What memory a program takes: what is kept, the peak, and what recomputing saves."""

from whence.reports.memory.recomputing import recomputing_of
from whence.reports.memory.storages import Storages
from whence.reports.memory.taken import Memory, memory_in, memory_of

__all__ = ["Memory", "Storages", "memory_in", "memory_of", "recomputing_of"]

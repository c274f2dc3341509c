"""What a capture assumed, and whether it still holds."""

from whence.guards.build import guards_of
from whence.guards.guarded import Guarded

__all__ = ["Guarded", "guards_of"]

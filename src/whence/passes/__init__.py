"""Program to program, provenance carried."""

from whence.passes.track import Edit, track

__all__ = ["Edit", "track"]

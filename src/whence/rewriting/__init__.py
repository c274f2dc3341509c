"""Program to program, provenance carried."""

from whence.rewriting.track import Edit, track

__all__ = ["Edit", "track"]

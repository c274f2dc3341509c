"""Which call, line and phase made a value: immutable values, no torch."""

from whence.provenance.origin import CallSite, Origin, Source
from whence.provenance.path import ROOT, ModulePath, PathPattern

__all__ = ["ROOT", "CallSite", "ModulePath", "Origin", "PathPattern", "Source"]

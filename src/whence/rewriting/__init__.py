"""Passes: from one valid program to another, with what is known of each node carried along."""

from whence.rewriting.decompose import Decompose
from whence.rewriting.move import Destination, moved
from whence.rewriting.passes import GraphPass, Pass, apply
from whence.rewriting.simplify import CommonSubexpressions, DeadCode
from whence.rewriting.track import Edit, track

__all__ = [
    "CommonSubexpressions",
    "DeadCode",
    "Decompose",
    "Destination",
    "Edit",
    "GraphPass",
    "Pass",
    "apply",
    "moved",
    "track",
]

"""Passes: from one valid program to another, with what is known of each node carried along."""

from whence.rewriting.decompose import Decompose
from whence.rewriting.move import moved
from whence.rewriting.passes import GraphPass, Pass, apply
from whence.rewriting.repairs import CutGradients, Functionalize
from whence.rewriting.simplify import CommonSubexpressions, ConstantFolding, DeadCode
from whence.rewriting.track import Edit, track

__all__ = [
    "CommonSubexpressions",
    "ConstantFolding",
    "CutGradients",
    "DeadCode",
    "Decompose",
    "Edit",
    "Functionalize",
    "GraphPass",
    "Pass",
    "apply",
    "moved",
    "track",
]

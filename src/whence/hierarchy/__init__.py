"""A program becomes a tree of modules: plan, check the plan, emit, run."""

from whence.hierarchy.emit.build import (
    DissolvedCall,
    flat_calls,
    flat_inside,
    flat_module,
    refuse_step,
    unflatten,
)
from whence.hierarchy.tree import Tree

__all__ = ["DissolvedCall", "Tree", "flat_calls", "flat_inside", "flat_module", "refuse_step", "unflatten"]

"""A program becomes a tree of modules: plan, check the plan, emit, run."""

from whence.hierarchy.emit.build import flat_module, refuse_step, unflatten, unflatten_onto
from whence.hierarchy.tree import Tree

__all__ = ["Tree", "flat_module", "refuse_step", "unflatten", "unflatten_onto"]

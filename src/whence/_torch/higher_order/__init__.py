"""Operators that run functions: branches, loops, maps."""

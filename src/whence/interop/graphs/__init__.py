"""Graphs that others made, in the form that a program has."""

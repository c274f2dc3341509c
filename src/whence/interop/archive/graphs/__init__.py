"""Graphs, as columns and back."""

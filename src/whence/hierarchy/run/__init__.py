"""Captured calls, run: alone or by their caller, with and without gradients."""

"""Tests of what a step changes in Python around it."""

"""A model and example inputs become a program; `capture.py` is the table of contents."""

from whence.tracing.capture import capture

__all__ = ["capture"]

"""A model and example inputs become a program; `capture.py` is the table of contents."""

from whence.tracing.capture import capture
from whence.tracing.steps.capture import capture_step
from whence.tracing.target.example import Given

__all__ = ["Given", "capture", "capture_step"]

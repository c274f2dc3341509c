"""A model and example inputs become a program; `capture.py` is the table of contents."""

from whence.tracing.capture import capture
from whence.tracing.steps.capture import capture_step
from whence.tracing.target.example import Given, Numbers
from whence.tracing.variants import variant_faults, with_variants_at

__all__ = ["Given", "Numbers", "capture", "capture_step", "variant_faults", "with_variants_at"]

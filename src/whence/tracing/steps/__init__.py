"""A training step becomes a program: forward, backward, and what the optimizer does."""

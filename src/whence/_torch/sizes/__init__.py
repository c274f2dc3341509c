"""Sizes and numbers that are symbols, on PyTorch's `ShapeEnv`."""

"""The only door to PyTorch's private parts.

Each file wraps one mechanism under a name of our own, says why the private part is needed, and has a canary
test in `tests/_torch/` that fails when PyTorch changes what we rely on.
"""

"""Tensors and modules that stand for others: wrapper subclasses, sharded and lazy ones."""

"""PyTorch's releases: which were tried, what whence relies on in them, and in what they differ.

Nothing else in whence asks for the release. A difference is a small file here that gives both spellings one
name, and goes when the older release goes.
"""

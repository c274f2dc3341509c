"""Autograd's graph and grad modes, and the switches of the calling thread."""

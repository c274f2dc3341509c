"""A program, laid out call by call: which call holds which node, and what crosses its borders."""

"""Values on the way: run a program's graph node by node, read and replace what it computes."""

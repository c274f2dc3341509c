"""From what was noted to an origin for every node."""

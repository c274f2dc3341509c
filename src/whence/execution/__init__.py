"""What runs code: programs bound to live state, and the comparison with eager."""

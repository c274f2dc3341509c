"""See what runs on one thread: calls, reads, writes, hooks, draws."""

"""Time and memory, beside PyTorch's own road in the same process and against the targets we set."""

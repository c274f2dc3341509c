"""Time and memory, as ratios against PyTorch's own road in the same process."""

"""What `torch.export` and AOT autograd keep private about their graphs."""

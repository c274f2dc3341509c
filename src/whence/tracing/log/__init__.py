"""What is written down while a model runs, event by event."""

"""What listens while a model runs: each part hears one kind of thing, and writes the log."""

"""What a capture assumed, as data."""

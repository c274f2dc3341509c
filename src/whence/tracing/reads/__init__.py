"""What a run reads and leaves behind outside of its arguments."""

"""What is kept of a call that was recorded, and how it is written once more."""

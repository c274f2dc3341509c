"""What an edit of a graph did, and everything that names nodes carried over it."""

"""Questions about a program: find, select, print."""

"""Questions about a program, answered as plain data and then as text."""

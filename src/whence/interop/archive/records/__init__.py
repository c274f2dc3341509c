"""Records of a program, as plain data and back."""

"""A plan becomes modules and the code of their calls, alone or from a caller, with and without gradients."""

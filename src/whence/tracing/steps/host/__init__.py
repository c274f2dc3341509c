"""What a step changes in Python beside tensors: found, held to be the same in every run, and written down."""

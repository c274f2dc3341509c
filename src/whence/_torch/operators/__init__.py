"""What operators are: their schemas, their kernels on fake tensors, what they are made of."""

"""What is captured, and what it is given: modules, example inputs, sizes that were asked for."""

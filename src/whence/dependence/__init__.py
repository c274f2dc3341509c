"""What Python relied on: values, variables, switches, and whether they are still the same."""

"""Record what runs into an fx graph, on fake tensors."""

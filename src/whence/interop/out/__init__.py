"""A Program becomes a `torch.export.ExportedProgram`."""

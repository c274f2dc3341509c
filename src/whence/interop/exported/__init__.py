"""A `torch.export.ExportedProgram` becomes a Program; `read.py` is the table of contents."""

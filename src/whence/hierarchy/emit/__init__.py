"""A plan becomes modules and their code."""

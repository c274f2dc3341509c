"""How a captured callable is called, and whether arguments fit."""

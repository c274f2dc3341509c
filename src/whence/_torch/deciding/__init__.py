"""Decisions by values: what the example says, and that every run is to say the same."""

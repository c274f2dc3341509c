"""From a recorded graph and its origins to a Program."""

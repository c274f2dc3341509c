"""Other modules in the places of captured ones."""

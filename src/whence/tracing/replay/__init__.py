"""Record what a module does once, and use the record for every call that must do the same."""

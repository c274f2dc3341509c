"""Record what a model does on a device that this machine need not have, on fake tensors that say so."""

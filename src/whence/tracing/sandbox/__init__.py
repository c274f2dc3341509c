"""Leave no trace: captures take turns, what a run changes is put back, what cannot be repeated is refused."""

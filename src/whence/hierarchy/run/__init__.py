"""What a module of the tree holds while it runs: its captured calls, what they take and give, its hooks."""

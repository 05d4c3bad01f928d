"""Planning: the documents of each rank in each step of an epoch."""

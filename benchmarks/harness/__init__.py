"""Times attention and other implementations on the same tensors, after a check of results; all benchmarks' ledger."""

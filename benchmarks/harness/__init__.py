"""Shared by all benchmarks: the registry of cases, the clock, the ledger of rows; attention beside others, checked."""

"""Benchmarks of packing: `pytest benchmarks/packing --benchmark-only`, and `python -m benchmarks.packing.compare`."""

"""Benchmarks of packing: `python -m benchmarks.cpu -k packing` and `python -m benchmarks.packing.compare`."""

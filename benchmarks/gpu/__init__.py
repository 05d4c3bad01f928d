"""Attention on a GPU beside its peers, in one process on the same tensors: `python3 -m benchmarks.gpu`."""

"""`tritonpack bench`: attention on this machine beside what else it could call, on the same tensors, right first.

What it measures and against what, `batch` and `peers`, needs torch alone: the benchmarks of the repository use it, too.
"""

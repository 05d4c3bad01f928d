"""`tritonpack bench`: attention on this machine beside other implementations, on the same tensors, checked first.

Everything but `command` needs torch and numpy alone, and serves the benchmarks of the repository too.
"""

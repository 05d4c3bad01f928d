"""`tritonpack bench`: times attention and other implementations on the same tensors, after a check of results.

All modules except `command` need only torch and numpy, and the benchmarks of the repository use them too.
"""

"""Sequence parallelism: the ranks of a group divide the rows of a batch and exchange keys and values."""

from tritonpack.parallel.all_gather_with_grad import AllGatherWithGrad
from tritonpack.parallel.attention import attend
from tritonpack.parallel.layouts import Layout, make_layout

__all__ = ["AllGatherWithGrad", "Layout", "attend", "make_layout"]

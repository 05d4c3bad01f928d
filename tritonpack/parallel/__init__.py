"""Sequence parallelism: who owns which rows of a batch, and how ranks attend to each other's."""

from tritonpack.parallel.all_gather_with_grad import AllGatherWithGrad
from tritonpack.parallel.attention import attend
from tritonpack.parallel.layouts import Layout, make_layout

__all__ = ["AllGatherWithGrad", "Layout", "attend", "make_layout"]

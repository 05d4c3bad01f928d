"""Sequence parallelism: who owns which rows of a batch, and how ranks attend to each other's."""

from tritonpack.parallel.collectives import AllGatherWithGrad

__all__ = ["AllGatherWithGrad"]

"""Sequence parallelism: who owns which rows of a batch, and how ranks attend to each other's."""

from tritonpack.parallel.collectives import AllGatherWithGrad
from tritonpack.parallel.exchange import attend
from tritonpack.parallel.layouts import Layout, make_layout
from tritonpack.parallel.planning import ExchangePlan, Prediction, plan

__all__ = ["AllGatherWithGrad", "ExchangePlan", "Layout", "Prediction", "attend", "make_layout", "plan"]

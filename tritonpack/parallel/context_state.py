"""The settings and the state of one SequenceParallel context, as the forwards of its models read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tritonpack.parallel.attention import Exchange
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.sharding import GradReduce, Sharding

SETTINGS = ("exchange", "layout", "heads_k_stride", "gather_outputs", "grad_reduce", "check_batches")


@dataclass(eq=False)
class ContextState:
    """The state of a context.

    Attributes:
        ranks: the group that shares batches.
        exchange, layout, heads_k_stride, gather_outputs, grad_reduce, check_batches: the arguments of SequenceParallel.
        entered: whether the context is entered.
        paused: whether models run whole on every rank for now.
        parameters: those that are compared between ranks before each forward.
        sharding: how the last batch was divided; None before the first one.
    """

    ranks: Ranks
    exchange: Exchange
    layout: LayoutName
    heads_k_stride: int | None
    gather_outputs: bool
    grad_reduce: GradReduce
    check_batches: bool
    entered: bool = False
    paused: bool = False
    parameters: Sequence[Tensor] = ()
    sharding: Sharding | None = None

    @property
    def running(self) -> bool:
        """Whether forwards share their batches at the moment."""
        return self.entered and not self.paused

    def __deepcopy__(self, _: Any) -> ContextState:
        return self  # a copy of a model is in the same context

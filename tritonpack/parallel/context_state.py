"""The settings and the state of one SequenceParallel context, as the forwards of its models read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tritonpack.parallel.attention import Exchange
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.shard_and_gather import GradReduce, Sharding

COMPARED = 4  # parameters that are compared before each forward: an optimizer step changes the smallest ones, too

SETTINGS = ("exchange", "layout", "heads_k_stride", "gather_outputs", "grad_reduce", "check_batches")


@dataclass(eq=False)
class ContextState:
    """The state of a context.

    Attributes:
        ranks: the group that shares batches.
        exchange, layout, heads_k_stride, gather_outputs, grad_reduce, check_batches: the arguments of SequenceParallel.
        entered: whether the context is entered.
        paused: whether models run whole on every rank for now.
        parameters: the trained parameters that must be equal on all ranks, the smallest first.
        forwards: how many forwards have compared parameters.
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
    forwards: int = 0
    sharding: Sharding | None = None

    @property
    def running(self) -> bool:
        """Whether forwards share their batches at the moment."""
        return self.entered and not self.paused

    def next_compared(self) -> list[Tensor]:
        """All parameters before the first forward, then the smallest ones and one other in turn."""
        self.forwards += 1
        if self.forwards == 1:
            return [*self.parameters]
        others = self.parameters[COMPARED:]
        turn = self.forwards % max(len(others), 1)
        return [*self.parameters[:COMPARED], *others[turn : turn + 1]]

    def __deepcopy__(self, _: Any) -> ContextState:
        return self  # a copy of a model is in the same context

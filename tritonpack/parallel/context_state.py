"""The settings and the state of one SequenceParallel context, which the forwards of its models read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.consistency import ComparedParameters
from tritonpack.parallel.dimensions import Exchanges
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.shard_and_gather import GradReduce, Sharding
from tritonpack.patches.parts import InstanceForward

SETTINGS = ("exchange", "layout", "heads_k_stride", "gather_outputs", "grad_reduce", "check_batches")


@dataclass(eq=False)
class ContextState:
    """The settings and the state of a context.

    Attributes:
        ranks: the group that shares batches.
        exchange, layout, heads_k_stride, gather_outputs, grad_reduce, check_batches: the arguments of SequenceParallel.
        entered: whether the context is entered.
        paused: whether models run whole batches on every rank for now.
        compared: the parameters that must be equal on all ranks; None before entering.
        sharding: how the last batch was divided; None before the first one.
        forwards: the forward of each shared module, by the id of the module.
    """

    ranks: Ranks
    exchange: Exchanges
    layout: LayoutName
    heads_k_stride: int | None
    gather_outputs: bool
    grad_reduce: GradReduce
    check_batches: bool
    entered: bool = False
    paused: bool = False
    compared: ComparedParameters | None = None
    sharding: Sharding | None = None
    forwards: dict[int, InstanceForward] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether forwards share their batches at the moment."""
        return self.entered and not self.paused

    def __deepcopy__(self, _: Any) -> ContextState:
        return self  # a copy of a model is in the same context

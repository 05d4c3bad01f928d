"""Trading rows for heads, differentiably: what "ulysses" does with queries, for recurrences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import wide
from tritonpack.parallel.exchanges.ulysses import Spans, to_heads, to_rows


class Trade(torch.autograd.Function):
    """(call, gathers_rows, spans, *tensors): this rank's rows of all heads to all rows of its heads, or the way back.

    `call` has ranks and a layout. spans[i][r] are the heads of tensor i that rank r computes. Copies of a head that
    several ranks have computed are summed.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, gathers_rows: bool, spans: list[Spans], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = call, gathers_rows, spans
        return _trade(call, gathers_rows, spans, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, gathers_rows, spans = ctx.arguments
        return None, None, None, *_trade(call, not gathers_rows, spans, gradients)


def _trade(call: Any, gathers_rows: bool, spans: list[Spans], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shipment = list(zip(tensors, spans, strict=True))
    if gathers_rows:
        return tuple(to_heads(call, shipment)())
    rows = call.layout.lengths[call.ranks.rank]
    totals = [x.new_zeros(rows, span[-1].stop, x.shape[2], dtype=wide(x.dtype)) for x, span in shipment]
    to_rows(call, shipment)(totals)
    return tuple(total.to(x.dtype) for total, x in zip(totals, tensors, strict=True))

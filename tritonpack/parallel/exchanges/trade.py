"""Trading rows for heads: ranks send rows of the heads that others compute, and get all rows of their own heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonpack.parallel.comm import all_to_all

Spans = tuple[slice, ...]  # for each rank some heads, numbered over all ranks
Shipment = Sequence[tuple[Tensor, Spans]]  # tensors that travel together, and the heads of each that a rank computes
Addition = Callable[[Sequence[Tensor]], None]  # waits for a shipment and adds it to tensors with the own rows


def send_rows(call: Any, shipment: Shipment) -> Callable[[], list[Tensor]]:
    """Start to send (own rows, all heads, D) of each tensor to the ranks that compute the heads.

    `call` has ranks and a layout. The results are (rows of others, own heads, D), in the order of the batch.
    """
    rank, size = call.ranks.rank, call.ranks.size
    lengths = [0 if r == rank else length for r, length in enumerate(call.layout.lengths)]
    pieces = [[x[: 0 if r == rank else None, spans[r]] for x, spans in shipment] for r in range(size)]
    widths = [(spans[rank].stop - spans[rank].start, x.shape[2]) for x, spans in shipment]
    coming = _exchange(call, pieces, [[(rows, *width) for width in widths] for rows in lengths])

    def arrive() -> list[Tensor]:
        laid = [torch.cat(parts) for parts in zip(*coming(), strict=True)]
        return laid if call.layout.in_order else [x.index_select(0, call.layout.others(rank).order) for x in laid]

    return arrive


def return_rows(call: Any, shipment: Shipment) -> Addition:
    """Start to send (rows of others, own heads, D) of each tensor to the owners of the rows.

    The result adds what arrives to tensors (own rows, all heads, D), one for each. Copies of a head are summed in the
    order of ranks.
    """
    rank, size, lengths = call.ranks.rank, call.ranks.size, call.layout.lengths
    sent = [0 if r == rank else lengths[r] for r in range(size)]
    laid = [
        (x if call.layout.in_order else x.index_select(0, call.layout.others(rank).inverse)).split(sent)
        for x, _ in shipment
    ]
    pieces = [[parts[r] for parts in laid] for r in range(size)]
    rows = [0 if r == rank else lengths[rank] for r in range(size)]
    shapes = [[(rows[r], spans[r].stop - spans[r].start, x.shape[2]) for x, spans in shipment] for r in range(size)]
    coming = _exchange(call, pieces, shapes)

    def add(totals: Sequence[Tensor]) -> None:
        for (_, spans), total, parts in zip(shipment, totals, zip(*coming(), strict=True), strict=True):
            for heads, part in zip(spans, parts, strict=True):
                if part.shape[0]:
                    total[:, heads] += part

    return add


def weave(call: Any, own: Tensor, others: Tensor) -> Tensor:
    """All rows (T, ...), in the order of the batch, from the own rows and those of other ranks."""
    rank = call.ranks.rank
    whole = own.new_empty(call.layout.num_rows, *own.shape[1:])
    whole.index_copy_(0, call.layout.rows[rank], own)
    return whole.index_copy_(0, call.layout.others(rank).rows, others)


def _exchange(
    call: Any, pieces: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> Callable[[], list[list[Tensor]]]:
    """Start to send the tensors pieces[r] to rank r, and to receive tensors of shapes[r] from it.

    Tensors of one dtype travel in one message, and those of several dtypes in one each.
    """
    if len({x.dtype for x in pieces[0]}) > 1:
        columns = zip(zip(*pieces, strict=True), zip(*shapes, strict=True), strict=True)
        separate = [_exchange(call, [[x] for x in some], [[one] for one in of_some]) for some, of_some in columns]
        return lambda: [[x for (x,) in row] for row in zip(*(arrive() for arrive in separate), strict=True)]
    sent = [sum(x.numel() for x in piece) for piece in pieces]
    counts = [[math.prod(shape) for shape in some] for some in shapes]
    message = torch.cat([x.flatten() for piece in pieces for x in piece])
    coming = all_to_all(message, sent, [sum(count) for count in counts], call.ranks)

    def arrive() -> list[list[Tensor]]:
        flat = iter(coming().split([n for count in counts for n in count]))
        return [[next(flat).view(shape) for shape in some] for some in shapes]

    return arrive

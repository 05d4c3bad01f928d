"""Exchange by all-gather: every rank receives the keys and values of all ranks, in steps of key heads (by_heads.py).

A reduce-scatter returns their gradients, in float32 for half precision. Shards are padded to the length of the longest.
"""

from __future__ import annotations

from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Arrival, gather, pad_to, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call


def mask_of(call: Call) -> BlockDiagonalMask:
    """The mask between own queries and all keys."""
    return call.rows_mask()


def send(call: Call, rows: Tensor) -> Arrival:
    """Start to gather the rows of all ranks, from own rows (n, width); the result is in the order of the batch."""
    coming = gather(pad_to(rows, 0, max(call.layout.lengths)), call.ranks)

    def arrive() -> Tensor:
        gathered = coming().flatten(0, 1)
        return gathered if call.layout.slots is None else gathered.index_select(0, call.layout.slots)

    return arrive


def give_back(call: Call, gradients: Tensor) -> Arrival:
    """Start to sum gradients (all rows, width) over ranks; the result has the own rows."""
    size, longest, slots = call.ranks.size, max(call.layout.lengths), call.layout.slots
    gradients = gradients.to(wide(gradients.dtype))
    if slots is not None:
        gradients = gradients.new_zeros(size * longest, *gradients.shape[1:]).index_copy_(0, slots, gradients)
    coming = scatter_sum(gradients.unflatten(0, (size, longest)), call.ranks)
    return lambda: coming()[: call.layout.lengths[call.ranks.rank]]

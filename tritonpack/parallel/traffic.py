"""What exchanges send and hold, in bytes: one layer's, on each rank.

Bytes received are exact, from the code of all_gather.py, ring.py and ulysses.py, for any lengths of shards and any
number of heads; tests count them in the collectives. Memory is an estimate: the largest buffers alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tritonpack.parallel.shape import AttentionShape
from tritonpack.parallel.ulysses import divide_heads

Bytes = NDArray[np.int64]


def head_shares(shape: AttentionShape, ranks: int) -> tuple[Bytes, Bytes]:
    """(ranks,) and (ranks,): how many query heads and key heads each rank computes in "ulysses"."""
    spans = divide_heads(shape.heads, shape.kv_heads, ranks)
    heads, keys = (np.array([span.stop - span.start for span in side], np.int64) for side in spans)
    return heads, keys


def received(exchange: str, lengths: Sequence[int], shape: AttentionShape) -> tuple[Bytes, Bytes]:
    """Bytes that each rank receives from others, of one layer: (ranks,) in forward, (ranks,) in backward.

    With n_r rows on rank r of R, T in all, N on the rank with most, h_r query heads and n_r' key heads that rank r
    computes in "ulysses", w = H_kv (D + D_v) numbers of a row's keys and values, and b bytes per number:

    - "all_gather": (R - 1) N w b; backward the same plus (R - 1) N w max(b, 4).
    - "ring": (T - n_r) w b; backward the same plus T w max(b, 4): the gradients come home, too.
    - "ulysses": ((T - n_r) (h_r D + n_r' (D + D_v)) + n_r (H - h_r) D_v) b; backward the other way around.

    Args:
        exchange: a name of `attend`'s.
        lengths: rows of each rank.
        shape: of the model's attention; "ulysses" needs a query head for every rank.
    """
    rows = np.asarray(lengths, np.int64)
    ranks, total, b = len(rows), int(rows.sum()), shape.bytes_per_number
    if ranks == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    if exchange == "ulysses":
        heads, keys = head_shares(shape, ranks)
        others = total - rows
        forward = others * (heads * shape.dim + keys * shape.key_row) + rows * (shape.heads - heads) * shape.dim_v
        backward = others * heads * shape.dim_v + rows * (
            (shape.heads - heads) * shape.dim + (keys.sum() - keys) * shape.key_row
        )
        return forward * b, backward * b
    row = shape.kv_heads * shape.key_row
    if exchange == "all_gather":
        numbers = np.full(ranks, (ranks - 1) * int(rows.max()) * row)
        return numbers * b, numbers * (b + shape.wide)
    numbers = (total - rows) * row
    return numbers * b, numbers * b + total * row * shape.wide


def held(exchange: str, lengths: Sequence[int], shape: AttentionShape, stride: int, in_order: bool) -> int:
    """Bytes that the exchange of one layer holds at its peak, on the rank with most: an estimate.

    Counted are what comes and goes, copies that put rows in order, and sums in wide numbers; not counted are q, k, v,
    out and their gradients of the rank's own rows, as attention on one rank has these, too.

    - "all_gather": two steps' keys of the whole batch, and their gradients in wide numbers, two steps' as well.
    - "ring": two blocks of keys, two of their gradients in wide numbers, and dq or out in wide numbers.
    - "ulysses": the own heads' q, k, v of the whole batch, as received and as one tensor each, and out.

    Args:
        exchange, lengths, shape: as in `received`.
        stride: key heads per step of "all_gather".
        in_order: whether the shards laid end to end are the batch in its order; else copies are in order.
    """
    rows = np.asarray(lengths, np.int64)
    ranks, longest, b = len(rows), int(rows.max()), shape.bytes_per_number
    if ranks == 1:
        return 0
    if exchange == "all_gather":
        numbers = ranks * longest * stride * shape.key_row
        return numbers * ((2 if in_order else 3) * b + 2 * shape.wide)
    if exchange == "ring":
        blocks = 2 * longest * shape.kv_heads * shape.key_row
        forward = blocks * b + longest * shape.heads * shape.dim_v * shape.wide
        return max(forward, blocks * (b + shape.wide) + longest * shape.heads * shape.dim * shape.wide)
    heads, keys = head_shares(shape, ranks)
    numbers = int((heads * shape.dim + keys * shape.key_row).max())
    return int(rows.sum()) * ((2 if in_order else 3) * numbers + int(heads.max()) * shape.dim_v) * b

"""Intervals as dense masks, a number or a bit per pair: in torch, or by a kernel on GPUs with the same results.

Rows begin at multiples of 16 bytes, which wide stores and torch's attention need. So a mask is contiguous only if its
rows end at such a multiple.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import check_flag
from tritonpack.masks.bounds import Bounds

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


def dense(mask: Bounds, dtype: torch.dtype, additive: bool) -> Tensor:
    """See `BlockDiagonalMask.to_dense`."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}. Write the mask as bool and cast it."
        )
    if check_flag(additive, "additive") and dtype == torch.bool:
        raise ValueError("an additive mask needs a floating-point dtype, such as the scores' dtype; got torch.bool.")
    seen, hidden = (0.0, torch.finfo(dtype).min) if additive else (1.0, 0.0)
    per_word = 4 // dtype.itemsize
    columns = _round_up(mask.num_keys, 4 * per_word)
    if kernels.serve(mask.key_start) and not mask.is_tree:
        from tritonpack.kernels.dense_mask import write_words

        patterns = [
            int(torch.full((per_word,), value, dtype=dtype, device="cpu").view(torch.int32)) for value in (seen, hidden)
        ]
        padded = write_words(mask.key_start, mask.key_stop, columns // per_word, per_word, *patterns).view(dtype)
    else:
        padded = _visible(mask, columns)
        if dtype != torch.bool:
            value = torch.full((), hidden, dtype=dtype, device=mask.device)
            padded = torch.where(padded, torch.full_like(value, seen), value)
    return padded[:, : mask.num_keys]


def bits(mask: Bounds) -> Tensor:
    """See `BlockDiagonalMask.to_bits`."""
    words = _round_up(mask.num_keys, 128) // 32
    if mask.query_stop is not None:
        place = 1 << torch.arange(32, device=mask.device)
        padded = (_visible(mask, words * 32).unflatten(1, (words, 32)) * place).sum(2).to(torch.int32)
    elif kernels.serve(mask.key_start):
        from tritonpack.kernels.dense_mask import write_words

        padded = write_words(mask.key_start, mask.key_stop, words, 32, -1, 0)
    else:
        keys = torch.arange(0, words * 32, 32, device=mask.device)
        below = [1 << (end[:, None] - keys).clamp(0, 32) for end in (mask.key_stop, mask.key_start)]
        padded = (below[0] - below[1]).to(torch.int32)
    return padded[:, : -(-mask.num_keys // 32)]


def _visible(mask: Bounds, columns: int) -> Tensor:
    """(num_queries, columns) bool, whether each pair is visible; columns past the keys aren't."""
    keys = torch.arange(columns, device=mask.device, dtype=torch.int32)
    visible = (keys >= mask.key_start[:, None]) & (keys < mask.key_stop[:, None])
    if mask.query_start is not None and mask.query_stop is not None:
        queries = torch.arange(mask.num_queries, device=mask.device, dtype=torch.int32)[:, None]
        seen = (queries >= mask.query_start) & (queries < mask.query_stop)
        visible[:, : mask.num_keys] &= seen
    return visible


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

"""Intervals as dense masks, a number or a bit per pair: in torch, or by a kernel on GPUs with the same results.

Rows begin at multiples of 16 bytes, which wide stores and torch's attention need. So a mask is contiguous only if its
rows end at such a multiple.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import check_flag

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


def dense(key_start: Tensor, key_stop: Tensor, num_keys: int, dtype: torch.dtype, additive: bool) -> Tensor:
    """See `BlockDiagonalMask.to_dense`."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}. Write the mask as bool and cast it."
        )
    if check_flag(additive, "additive") and dtype == torch.bool:
        raise ValueError("an additive mask needs a floating-point dtype, such as the scores' dtype; got torch.bool.")
    seen, hidden = (0.0, torch.finfo(dtype).min) if additive else (1.0, 0.0)
    per_word = 4 // dtype.itemsize
    columns = _round_up(num_keys, 4 * per_word)
    if kernels.serve(key_start):
        from tritonpack.kernels.dense_mask import write_words

        patterns = [int(torch.full((per_word,), value, dtype=dtype).view(torch.int32)) for value in (seen, hidden)]
        padded = write_words(key_start, key_stop, columns // per_word, per_word, *patterns).view(dtype)
    else:
        keys = torch.arange(columns, device=key_start.device, dtype=torch.int32)
        padded = (keys >= key_start[:, None]) & (keys < key_stop[:, None])
        if dtype != torch.bool:
            value = torch.full((), hidden, dtype=dtype, device=key_start.device)
            padded = torch.where(padded, torch.full_like(value, seen), value)
    return padded[:, :num_keys]


def bits(key_start: Tensor, key_stop: Tensor, num_keys: int) -> Tensor:
    """See `BlockDiagonalMask.to_bits`."""
    words = _round_up(num_keys, 128) // 32
    if kernels.serve(key_start):
        from tritonpack.kernels.dense_mask import write_words

        padded = write_words(key_start, key_stop, words, 32, -1, 0)
    else:
        keys = torch.arange(0, words * 32, 32, device=key_start.device)
        below = [1 << (end[:, None] - keys).clamp(0, 32) for end in (key_stop, key_start)]
        padded = (below[0] - below[1]).to(torch.int32)
    return padded[:, : -(-num_keys // 32)]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

"""The random bits of dropout in torch, equal to the bits of the kernels: a function of seed, head, query and key.

So nothing is stored for backward, and all backends drop the same pairs. Source: Salmon et al., Parallel random numbers:
as easy as 1, 2, 3 (SC 2011), Philox 4x32 with ten rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def keep_mask(seed: Tensor, heads: Tensor, queries: Tensor, keys: Tensor, dropout_p: float) -> Tensor:
    """Whether dropout keeps each pair.

    Args:
        seed: () int64.
        heads, queries, keys: integers that broadcast against each other: query heads, and rows of the two streams.
        dropout_p: the probability that a pair is dropped, rounded to a multiple of 2**-31.

    Returns:
        bool in the broadcast shape.
    """
    # Words of 32 bits in tensors of int64. Counter: key, query, head, 0.
    word0, word1, word2 = torch.broadcast_tensors(keys.long(), queries.long(), heads.long())
    word3 = torch.zeros_like(word0)
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _product(word0, _MULTIPLIERS[0])
        high2, low2 = _product(word2, _MULTIPLIERS[1])
        word0, word1, word2, word3 = high2 ^ word1 ^ key0, low2, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return (word0 >> 1) >= drop_below(dropout_p)


def drop_below(dropout_p: float) -> int:
    """The bound below which a random number of 31 bits drops its pair, an int32."""
    return min(round(dropout_p * 2**31), 2**31 - 1)


def _product(x: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of x * y, both below 2**32, without an overflow of int64."""
    low, high = x & 0xFFFF, x >> 16
    low = low * y
    middle = high * y + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)

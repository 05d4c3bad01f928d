"""The random bits of dropout in torch. They equal the bits of the kernels: a function of seed, head, query and key.

So nothing is stored for backward, and all backends drop the same pairs. Two neighbouring queries and two neighbouring
keys share one call of the generator (docs/math.md, section 6). Source: Salmon et al., Parallel random numbers: as easy
as 1, 2, 3 (SC 2011), Philox 2x32 with seven rounds, the fewest that pass their tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_KEY_STEP = 0x9E3779B9
_ROUNDS = 7


def keep_mask(seed: Tensor, heads: Tensor, queries: Tensor, keys: Tensor, dropout_p: float) -> Tensor:
    """Return the pairs that dropout keeps.

    Args:
        seed: () int64.
        heads, queries, keys: integers that broadcast against each other: query heads, and rows of the two streams.
        dropout_p: the probability that a pair is dropped, rounded to a multiple of 2**-31.

    Returns:
        bool in the broadcast shape.
    """
    queries, keys = queries.long(), keys.long()
    head_keys, _ = philox(seed & _LOW, heads.long(), seed >> 32)
    first, second = philox(head_keys, queries >> 1, keys >> 1)
    word = torch.where(queries % 2 == 0, first, second)
    number = torch.where(keys % 2 == 0, (word << 16 & _LOW) | (word >> 16), word)
    return (number >> 1) >= drop_below(dropout_p)


def philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both words of Philox 2x32-7 for a key and the two words of a counter, which broadcast.

    All words have 32 bits, in tensors of int64.
    """
    for _ in range(_ROUNDS):
        high, low = _product(first)
        first, second = high ^ key ^ second, low
        key = (key + _KEY_STEP) & _LOW
    return first, second


def drop_below(dropout_p: float) -> int:
    """Return the bound, an int32, below which a random number of 31 bits drops its pair."""
    return min(round(dropout_p * 2**31), 2**31 - 1)


def _product(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of x times the multiplier, without an overflow of int64."""
    low, high = x & 0xFFFF, x >> 16
    low = low * _MULTIPLIER
    middle = high * _MULTIPLIER + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)

"""The batches that are measured: documents of some distributions of lengths, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask

NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Shape:
    """Tokens of a batch, its heads and their size; each key head serves `heads / kv_heads` query heads."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Batch:
    """A packed batch.

    Attributes:
        lengths: tokens of its documents.
        q, k, v, dout: (tokens, heads, head_dim), those of k and v with their own heads; dout is the output's gradient.
        cu_seqlens: (documents + 1,) int32, where documents begin.
        mask: which keys each query sees, as the next two say.
        causal: whether a query sees no later key.
        window: how many keys before and after itself a query sees, besides itself; -1 is without limit.
    """

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor
    mask: BlockDiagonalMask
    causal: bool = True
    window: tuple[int, int] = NO_WINDOW

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    def visible_pairs(self) -> int:
        """How many (query, key) pairs have to be computed: the useful work."""
        return int((self.mask.key_stop - self.mask.key_start).sum(dtype=torch.int64))

    def flops(self) -> int:
        """Of a forward pass over the visible pairs: two matrix products."""
        return 4 * self.q.shape[1] * self.q.shape[2] * self.visible_pairs()


def distributions(tokens: int) -> dict[str, tuple[int, ...]]:
    """Lengths that sum to `tokens`, by what they are like.

    The log-normal ones have the shape of instruction data: most documents are short, a few are long.
    """
    draws = np.random.default_rng(0).lognormal(np.log(200) - 0.8**2 / 2, 0.8, tokens)
    half = tokens // 2
    return {
        "one document": (tokens,),
        "one long, many of 64": (tokens - half, *_fill(np.full(half, 64), half)),
        "log-normal, mean 200": _fill(np.clip(draws, 8, 4096).astype(np.int64), tokens),
        "all of 20": _fill(np.full(tokens, 20), tokens),
    }


def make_batch(lengths: tuple[int, ...], shape: Shape, seed: int = 0) -> Batch:
    """Random tensors for documents of these lengths, the same on every device up to rounding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(shape.tokens, heads, shape.head_dim, generator=generator).to(shape.device, shape.dtype)

    q, k, v, dout = (draw(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(shape.device, torch.int32)
    mask = BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=shape.tokens)
    return Batch(lengths, q, k, v, dout, cu_seqlens, mask)


def _fill(lengths: np.ndarray, tokens: int) -> tuple[int, ...]:
    """The first lengths that fill the batch, the last one cut to fit; each is at least 1."""
    ends = np.minimum(np.cumsum(lengths), tokens)
    count = int(np.searchsorted(ends, tokens)) + 1 if tokens else 0
    return tuple(np.diff(ends[:count], prepend=0).tolist())

"""The batches that are measured: shapes, document lengths and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask

NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch, and the kind of its attention.

    Attributes:
        distribution: the name of the distribution that the lengths of documents follow.
        tokens: number of tokens of all documents together.
        heads, kv_heads: number of query heads, and of key heads; each key head serves heads / kv_heads query heads.
        head_dim: size of each head.
        causal: whether a query sees no later key.
        window: how many keys a query sees before and after itself; -1 means no limit.
        dtype: torch's name of the dtype.
        trees: whether the documents are trees of tokens.
    """

    distribution: str
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True
    window: tuple[int, int] = NO_WINDOW
    dtype: str = "bfloat16"
    trees: bool = False

    def parameters(self) -> dict[str, object]:
        """The shape as the parameters of a case."""
        window = "" if self.window == NO_WINDOW else "{} {}".format(*self.window)
        return asdict(self) | {"window": window, "trees": self.trees or None}

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        window = "" if self.window == NO_WINDOW else f", window {self.window[0]}"
        sizes = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.distribution}, {self.tokens} tokens, {sizes}, {kind}{window}"


@dataclass(frozen=True)
class Batch:
    """A packed batch.

    Attributes:
        shape: its sizes, and the kind of its attention.
        lengths: number of tokens of each document or tree.
        q, k, v: (tokens, heads, head_dim); k and v have kv_heads heads.
        dout: as q, the gradient of the output.
        cu_seqlens: (documents + 1,) int32, where each document begins and the last one ends.
        mask: which keys each query sees.
    """

    shape: Shape
    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor
    mask: BlockDiagonalMask

    def flops(self) -> int:
        """The operations of the two matrix products of a forward pass, counted over the visible pairs."""
        mask = self.mask.transpose() if self.mask.is_tree else self.mask  # in a tree keys have the exact intervals
        pairs = int((mask.key_stop - mask.key_start).sum(dtype=torch.int64))
        return 4 * self.shape.heads * self.shape.head_dim * pairs


def make_batch(
    shape: Shape,
    lengths: Sequence[int],
    device: torch.device | str,
    seed: int = 0,
    *,
    parents: Sequence[int] | None = None,
) -> Batch:
    """Random tensors for documents of these lengths, or for trees; never zeros, which matrix units multiply faster.

    Args:
        parents: of a batch of trees, as `BlockDiagonalMask.from_tree` takes them.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        size, dtype = (shape.tokens, heads, shape.head_dim), getattr(torch, shape.dtype)
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    q, k, v, dout = (draw(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads))
    cu_seqlens = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device=device, dtype=torch.int32)
    if parents is None:
        mask = BlockDiagonalMask.from_cu_seqlens(
            cu_seqlens, causal=shape.causal, window=shape.window, total_q=shape.tokens
        )
    else:
        mask = BlockDiagonalMask.from_tree(parents, window=shape.window).to(device)
    return Batch(shape, tuple(lengths), q, k, v, dout, cu_seqlens, mask)

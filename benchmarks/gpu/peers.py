"""What else a user could call: each peer takes the same packed tensors and returns the same packed output.

A peer that can't be imported, or refuses the shape, is reported with the reason and leaves the comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tritonpack import BlockDiagonalMask, varlen_attention


@dataclass(frozen=True)
class Batch:
    """A causal packed batch: q (T, H, D), k and v (T, H_kv, D), dout like q, and where its documents begin."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    mask: BlockDiagonalMask


Forward = Callable[[], Tensor]


def tritonpack_peer(batch: Batch) -> Forward:
    return lambda: varlen_attention(batch.q, batch.k, batch.v, batch.mask, backend="triton")


def tritonpack_with_mask(batch: Batch) -> Forward:
    """The mask built anew in every call, as a training step's first layer does."""

    def forward() -> Tensor:
        mask = BlockDiagonalMask.from_cu_seqlens(batch.cu_seqlens, total_q=batch.q.shape[0])
        return varlen_attention(batch.q, batch.k, batch.v, mask, backend="triton")

    return forward


def torch_varlen(batch: Batch) -> Forward:
    """torch's own FlashAttention-2; its signature moved between 2.10 and 2.13."""
    varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    longest = max(batch.lengths)
    k, v = batch.k, batch.v
    if "enable_gqa" in names:
        options["enable_gqa"] = True
        return lambda: varlen_attn(batch.q, k, v, batch.cu_seqlens, batch.cu_seqlens, longest, longest, **options)
    group = batch.q.shape[1] // k.shape[1]

    def forward() -> Tensor:
        ks, vs = (x.repeat_interleave(group, 1) for x in (k, v))
        return varlen_attn(batch.q, ks, vs, batch.cu_seqlens, batch.cu_seqlens, longest, longest, **options)

    return forward


def sdpa_padded(batch: Batch) -> Forward:
    """Stock padded training: rows as long as the longest document, causal, the packed rows gathered afterwards."""
    rows, width = len(batch.lengths), max(batch.lengths)
    if rows * width > 64 * batch.q.shape[0]:
        raise ValueError(f"{rows} rows of {width} would be {rows * width / batch.q.shape[0]:.0f} times the tokens")
    place = (
        torch.arange(width, device=batch.q.device)[None] < torch.tensor(batch.lengths, device=batch.q.device)[:, None]
    )
    index = place.flatten().nonzero().squeeze(1)

    def padded(x: Tensor) -> Tensor:
        flat = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, index, x)
        return flat.view(rows, width, *x.shape[1:]).transpose(1, 2)

    def forward() -> Tensor:
        q, k, v = (padded(x) for x in (batch.q, batch.k, batch.v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[index]

    return forward


def sdpa_dense_mask(batch: Batch) -> Forward:
    """What sdpa users get when packing is honoured: a dense T x T mask."""
    tokens = batch.q.shape[0]
    if tokens > 32768:
        raise ValueError(f"a dense mask of {tokens} x {tokens} is out of the question")
    dense = batch.mask.to_dense()

    def forward() -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        return out[0].transpose(0, 1)

    return forward


PEERS: dict[str, Callable[[Batch], Forward]] = {
    "tritonpack": tritonpack_peer,
    "tritonpack+mask": tritonpack_with_mask,
    "torch-varlen (FA2)": torch_varlen,
    "sdpa-padded": sdpa_padded,
    "sdpa-dense-mask": sdpa_dense_mask,
}

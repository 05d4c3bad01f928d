"""Ways to compute the attention of a packed batch, each on tensors in the layout that it wants.

What a training loop does once per batch, before the first layer (laying documents out in padded rows, building a mask),
is done when a peer is prepared, and isn't timed: a model's layers share it.
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

from tritonpack.attention import varlen_attention
from tritonpack.cli.bench.batch import Batch

OURS = "tritonpack"
_MOST_PADDING = 32  # times the tokens: beyond that padding is out of the question


@dataclass(frozen=True)
class Prepared:
    """A peer, ready for a batch.

    Attributes:
        leaves: q, k and v in its layout, which gradients are taken of.
        dout: the gradient of its output.
        forward: computes the output from the leaves.
        packed: its layout to (tokens, heads, head_dim), of outputs and of gradients.
    """

    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    forward: Callable[[], Tensor]
    packed: Callable[[Tensor], Tensor]


def ours(batch: Batch) -> Prepared:
    """varlen_attention on the backend that it chooses by itself."""
    q, k, v = _leaves(batch.q, batch.k, batch.v)
    return Prepared((q, k, v), batch.dout, lambda: varlen_attention(q, k, v, batch.mask), lambda x: x)


def sdpa_padded(batch: Batch) -> Prepared:
    """A document per row, padded to the longest: stock training without packing."""
    rows, width = len(batch.lengths), max(batch.lengths)
    if rows * width > _MOST_PADDING * batch.q.shape[0]:
        raise ValueError(f"{rows} rows of {width} would be {rows * width / batch.q.shape[0]:.0f} times the tokens")
    lengths = batch.cu_seqlens.diff()
    tokens = (torch.arange(width, device=lengths.device) < lengths[:, None]).flatten().nonzero().squeeze(1)

    def padded(x: Tensor) -> Tensor:
        flat = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, tokens, x)
        return flat.unflatten(0, (rows, width)).transpose(1, 2).contiguous()

    q, k, v = _leaves(padded(batch.q), padded(batch.k), padded(batch.v))
    return Prepared(
        (q, k, v),
        padded(batch.dout),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda x: x.transpose(1, 2).flatten(0, 1)[tokens],
    )


def sdpa_dense_mask(batch: Batch) -> Prepared:
    """One row and a dense mask of tokens x tokens: what packing is without an attention that knows documents."""
    dense = batch.mask.to_dense()
    q, k, v = _leaves(*(_one_row(x) for x in (batch.q, batch.k, batch.v)))
    group = q.shape[1] // k.shape[1]

    def forward() -> Tensor:
        if q.is_cuda:  # where sdpa's fused kernels take a mask or grouped heads, but not both
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
            return scaled_dot_product_attention(q, keys, values, attn_mask=dense)
        return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)

    return Prepared((q, k, v), _one_row(batch.dout), forward, lambda x: x[0].transpose(0, 1))


def torch_varlen(batch: Batch) -> Prepared:
    """torch's own varlen_attn, which is FlashAttention-2; its signature has changed since it came."""
    varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn
    q, k, v = _leaves(batch.q, batch.k, batch.v)
    group, longest = q.shape[1] // k.shape[1], max(batch.lengths)
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        options["enable_gqa"] = True

    def forward() -> Tensor:
        keys, values = (k, v) if "enable_gqa" in names else (x.repeat_interleave(group, 1) for x in (k, v))
        return varlen_attn(q, keys, values, batch.cu_seqlens, batch.cu_seqlens, longest, longest, **options)

    return Prepared((q, k, v), batch.dout, forward, lambda x: x)


def flex_attention(batch: Batch) -> Prepared:
    """FlexAttention under torch.compile, with the block mask of the documents."""
    compiled: Any = torch.compile(import_module("torch.nn.attention.flex_attention").flex_attention)
    block_mask = batch.mask.to_block_mask()
    q, k, v = _leaves(*(_one_row(x) for x in (batch.q, batch.k, batch.v)))
    return Prepared(
        (q, k, v),
        _one_row(batch.dout),
        lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True),
        lambda x: x[0].transpose(0, 1),
    )


def peers_for(device: torch.device) -> dict[str, Callable[[Batch], Prepared]]:
    """Ours first, then whatever else can be called on the device."""
    peers: dict[str, Callable[[Batch], Prepared]] = {
        OURS: ours,
        "sdpa, padded": sdpa_padded,
        "sdpa, dense mask": sdpa_dense_mask,
    }
    if device.type == "cuda":
        peers |= {"torch varlen_attn": torch_varlen, "FlexAttention": flex_attention}
    return peers


def _leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()


def _one_row(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].contiguous()

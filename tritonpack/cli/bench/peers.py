"""Ways to compute the attention of a packed batch, each on tensors in the layout that it wants.

What a training loop does once per batch, before the first layer (laying documents out in padded rows, building a mask),
is done when a peer is prepared, and isn't timed: a model's layers share it. A peer that can't be imported, or refuses a
batch, says so by raising.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tritonpack.attention import varlen_attention
from tritonpack.cli.bench.batch import NO_WINDOW, Batch

OURS = "tritonpack"
MOST_PADDING = 16  # times the tokens: beyond that padding is out of the question
LARGEST_DENSE = 32768

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a peer has its tensors.

    Attributes:
        enter: (tokens, heads, head_dim) to its layout.
        leave: back again.
    """

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]


def packed(batch: Batch) -> Layout:
    """(tokens, heads, head_dim), as the batch itself."""
    return Layout(lambda x: x, lambda x: x)


def one_row(batch: Batch) -> Layout:
    """(1, heads, tokens, head_dim)."""
    return Layout(lambda x: x.transpose(0, 1)[None].contiguous(), lambda x: x[0].transpose(0, 1))


def padded(batch: Batch) -> Layout:
    """(documents, heads, longest, head_dim), zeros after the end of each.

    Raises:
        ValueError: more padding than anybody would take.
    """
    rows, width = len(batch.lengths), max(batch.lengths)
    if rows * width > MOST_PADDING * batch.q.shape[0]:
        raise ValueError(f"{rows} rows of {width} would be {rows * width / batch.q.shape[0]:.0f} times the tokens")
    tokens = _real(batch).flatten().nonzero().squeeze(1)

    def enter(x: Tensor) -> Tensor:
        flat = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, tokens, x)
        return flat.unflatten(0, (rows, width)).transpose(1, 2).contiguous()

    return Layout(enter, lambda x: x.transpose(1, 2).flatten(0, 1)[tokens])


def _real(batch: Batch) -> Tensor:
    """(documents, longest) bool: which places hold a token."""
    lengths = batch.cu_seqlens.diff()
    return torch.arange(max(batch.lengths), device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Peer:
    """An implementation.

    Attributes:
        name: for people, and in ledgers.
        prepare: makes the function of q, k and v, in its layout, that computes a batch.
        layout: what it has tensors in.
    """

    name: str
    prepare: Callable[[Batch], Attention]
    layout: Callable[[Batch], Layout] = packed


class Prepared:
    """A peer, ready for a batch.

    Attributes:
        layout: of its tensors.
        leaves: q, k and v in its layout, which gradients are taken of.
        dout: the gradient of its output, likewise.
    """

    def __init__(self, peer: Peer, batch: Batch) -> None:
        self._attention = peer.prepare(batch)  # first: what refuses needs no copies
        self.layout = peer.layout(batch)
        q, k, v = (self.layout.enter(x).detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
        self.leaves, self.dout = (q, k, v), self.layout.enter(batch.dout)

    def forward(self) -> Tensor:
        """The output, in its layout."""
        return self._attention(*self.leaves)

    def gradients(self, out: Tensor, dout: Tensor) -> list[Tensor]:
        """dq, dk and dv of an output, whose graph is kept, given (tokens, heads, head_dim) and so returned."""
        found = torch.autograd.grad(out, self.leaves, self.layout.enter(dout), retain_graph=True)
        return [self.layout.leave(x) for x in found]


# -------------------------------------------------------------------------------------------------------------- ours


def ours(batch: Batch) -> Attention:
    """varlen_attention on the backend that it chooses by itself."""
    return lambda q, k, v: varlen_attention(q, k, v, batch.mask)


# -------------------------------------------------------------------------------------------------------------- sdpa


def fused_sdpa(device: torch.device) -> AbstractContextManager[Any]:
    """Bars the kernel that writes all scores to memory, on GPUs: it would be a straw man, where it fits at all."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel(fused) if device.type == "cuda" else nullcontext()


def sdpa_padded(batch: Batch) -> Attention:
    """A document per row, padded to the longest: stock training without packing."""
    if batch.window != NO_WINDOW:
        raise ValueError("a padded batch with a window needs the dense mask, too")
    real = _real(batch)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with fused_sdpa(q.device):
            if batch.causal:
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return scaled_dot_product_attention(q, *_for_every_head(q, k, v), attn_mask=real[:, None, None])

    return attention


def sdpa_dense_mask(batch: Batch) -> Attention:
    """One row and a dense mask of tokens x tokens: what packing is without an attention that knows documents."""
    tokens = batch.q.shape[0]
    if tokens > LARGEST_DENSE:
        raise ValueError(f"a dense mask of {tokens} x {tokens} is out of the question")
    dense = batch.mask.to_dense()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda:
            return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        with fused_sdpa(q.device):
            return scaled_dot_product_attention(q, *_for_every_head(q, k, v), attn_mask=dense)

    return attention


def _for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as transformers gives them to sdpa where there is a mask: fused kernels that take one know no groups."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


# ------------------------------------------------------------------------------------------------------------- torch


def torch_varlen(batch: Batch) -> Attention:
    """torch's own FlashAttention-2: torch 2.10 says `is_causal`, 2.11 `window_size`, 2.12 also `enable_gqa`."""
    function: Any = import_module("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if "window_size" in names:
        options["window_size"] = (batch.window[0], 0 if batch.causal else batch.window[1])
    elif batch.window != NO_WINDOW:
        raise ValueError("this version of torch's varlen_attn has no window")
    else:
        options["is_causal"] = batch.causal
    if "enable_gqa" in names:
        options["enable_gqa"] = True
    cu_seqlens, longest = batch.cu_seqlens, max(batch.lengths)
    return lambda q, k, v: function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def torch_knows_groups() -> bool:
    """Whether torch's varlen_attn takes fewer key heads than query heads."""
    try:
        function: Any = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return True  # there is nothing to work around
    return "enable_gqa" in inspect.signature(function).parameters


def repeated(prepare: Callable[[Batch], Attention]) -> Callable[[Batch], Attention]:
    """The peer with a copy of its key head for every query head, where it doesn't know groups; packed tensors."""

    def prepare_repeated(batch: Batch) -> Attention:
        attention = prepare(batch)
        return lambda q, k, v: attention(q, *_for_every_head(q, k, v))

    return prepare_repeated


def flex_attention(batch: Batch) -> Attention:
    """FlexAttention under torch.compile, with the block mask of the documents."""
    compiled: Any = torch.compile(import_module("torch.nn.attention.flex_attention").flex_attention)
    block_mask = batch.mask.to_block_mask()
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)


SDPA = (Peer("sdpa, padded", sdpa_padded, padded), Peer("sdpa, dense mask", sdpa_dense_mask, one_row))


def peers_for(device: torch.device) -> list[Peer]:
    """Ours first, then whatever else can be called on the device."""
    peers = [Peer(OURS, ours), *SDPA]
    if device.type == "cuda":
        varlen = torch_varlen if torch_knows_groups() else repeated(torch_varlen)
        peers += [Peer("torch varlen_attn", varlen), Peer("FlexAttention", flex_attention, one_row)]
    return peers

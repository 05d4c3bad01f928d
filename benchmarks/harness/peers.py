"""The implementations of attention that are compared, each on tensors in its own layout.

A peer is prepared once per batch: documents are laid out in padded rows, or a mask is built. This isn't timed, because
all layers of a model share it. A peer that isn't installed, or doesn't accept a batch, raises an exception. Libraries
count windows in different ways; the check of results shows whether an adapter converts them correctly.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.batch import NO_WINDOW, Batch, Shape
from benchmarks.harness.registry import OURS
from tritonpack.attention import varlen_attention

MOST_PADDING = 16  # padded batches of more than this many times the tokens are refused
LARGEST_DENSE = 32768  # tokens beyond which a dense mask is refused

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
# A peer's layout: a function from (tokens, heads, head_dim) to the layout of its tensors, and one back.
Layout = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def packed(batch: Batch) -> Layout:
    """(tokens, heads, head_dim), the layout of the batch itself."""
    return lambda x: x, lambda x: x


def one_row(batch: Batch) -> Layout:
    """(1, heads, tokens, head_dim)."""
    return lambda x: x.transpose(0, 1)[None].contiguous(), lambda x: x[0].transpose(0, 1)


def padded(batch: Batch) -> Layout:
    """(documents, heads, longest, head_dim), with zeros after the end of each document.

    Raises:
        ValueError: the padded batch is larger than MOST_PADDING times the tokens.
    """
    rows, width = len(batch.lengths), max(batch.lengths)
    if rows * width > MOST_PADDING * batch.shape.tokens:
        raise ValueError(f"{rows} rows of {width} would be {rows * width / batch.shape.tokens:.0f} times the tokens")
    tokens = _real(batch).flatten().nonzero().squeeze(1)

    def enter(x: Tensor) -> Tensor:
        flat = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, tokens, x)
        return flat.unflatten(0, (rows, width)).transpose(1, 2).contiguous()

    return enter, lambda x: x.transpose(1, 2).flatten(0, 1)[tokens]


def _real(batch: Batch) -> Tensor:
    """(documents, longest) bool: which places of the padded batch hold a token."""
    lengths = batch.cu_seqlens.diff()
    return torch.arange(max(batch.lengths), device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Peer:
    """An implementation of attention.

    Attributes:
        name: its name in tables and ledgers.
        prepare: builds, for a batch, the function of q, k and v in the peer's layout.
        layout: the layout of its tensors.
        meant_for: whether the peer is measured at a shape of documents.
        on_cpu: whether it is measured on a CPU, too.
        trees: whether it takes masks of trees.
    """

    name: str
    prepare: Callable[[Batch], Attention]
    layout: Callable[[Batch], Layout] = packed
    meant_for: Callable[[Shape], bool] = lambda shape: True
    on_cpu: bool = False
    trees: bool = False

    def fits(self, shape: Shape) -> bool:
        """Return whether the peer is measured at a shape."""
        return self.meant_for(shape) and (self.trees or not shape.trees)


class Prepared:
    """A peer with its own copy of a batch's tensors.

    Attributes:
        enter, leave: convert tensors to the peer's layout and back.
        leaves: q, k and v in the peer's layout; they require gradients.
        dout: the gradient of the output, in the peer's layout.
    """

    def __init__(self, peer: Peer, batch: Batch) -> None:
        self._attention = peer.prepare(batch)  # before any copy, because it may refuse the batch
        self.enter, self.leave = peer.layout(batch)
        self.leaves = tuple(self.enter(x).detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
        self.dout = self.enter(batch.dout)

    def forward(self) -> Tensor:
        """The output, in the peer's layout."""
        return self._attention(*self.leaves)

    def backward(self, out: Tensor, dout: Tensor | None = None) -> tuple[Tensor, ...]:
        """dq, dk and dv for an output of `forward`, whose graph is kept; all in the peer's layout."""
        return torch.autograd.grad(out, self.leaves, self.dout if dout is None else dout, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        """Forward, then backward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.dout)


def ours(batch: Batch, **options: Any) -> Attention:
    """varlen_attention on the mask of the batch."""
    return lambda q, k, v: varlen_attention(q, k, v, batch.mask, **options)


def _fused_sdpa(device: torch.device) -> AbstractContextManager[Any]:
    """On GPUs, exclude the kernel that writes all scores to memory, because it is never the best choice."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel(fused) if device.type == "cuda" else nullcontext()


def _for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with one head for every query head, for kernels that don't take grouped heads; heads are dimension 1."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def sdpa_padded(batch: Batch) -> Attention:
    """One document per row, padded to the longest: stock training without packing."""
    if batch.shape.window != NO_WINDOW:
        raise ValueError("a padded batch with a window needs the dense mask, too")
    real = _real(batch)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _fused_sdpa(q.device):
            if batch.shape.causal:
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return scaled_dot_product_attention(q, *_for_every_head(q, k, v), attn_mask=real[:, None, None])

    return attention


def sdpa_dense_mask(batch: Batch) -> Attention:
    """One row with a dense mask (tokens, tokens): packing without an attention function for it."""
    tokens = batch.shape.tokens
    if tokens > LARGEST_DENSE:
        raise ValueError(f"a dense mask of {tokens} x {tokens} needs too much memory")
    dense = batch.mask.to_dense()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda:
            return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        with _fused_sdpa(q.device):  # these kernels take a mask or grouped heads, not both
            return scaled_dot_product_attention(q, *_for_every_head(q, k, v), attn_mask=dense)

    return attention


def torch_varlen(batch: Batch) -> Attention:
    """torch's own FlashAttention-2: torch 2.10 has `is_causal`, 2.11 `window_size`, 2.12 also `enable_gqa`."""
    function: Any = import_module("torch.nn.attention.varlen").varlen_attn
    shape, names = batch.shape, inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if "window_size" in names:
        options["window_size"] = (shape.window[0], 0 if shape.causal else shape.window[1])
    elif shape.window != NO_WINDOW:
        raise ValueError("this version of torch's varlen_attn has no window")
    else:
        options["is_causal"] = shape.causal
    cu_seqlens, longest = batch.cu_seqlens, max(batch.lengths)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)

    if "enable_gqa" not in names:
        return lambda q, k, v: attention(q, *_for_every_head(q, k, v))
    options["enable_gqa"] = True
    return attention


def flash_attention(batch: Batch, module: str, unlimited: int | None) -> Attention:
    """FlashAttention-3 or -4, some versions of which return (out, lse); `unlimited` is a window side without limit."""
    function: Any = import_module(module).flash_attn_varlen_func
    left, right = (unlimited if side == -1 else side for side in batch.shape.window)
    options: dict[str, Any] = {
        "cu_seqlens_q": batch.cu_seqlens,
        "cu_seqlens_k": batch.cu_seqlens,
        "causal": batch.shape.causal,
        "window_size": (left, right),
        "max_seqlen_q": max(batch.lengths),
        "max_seqlen_k": max(batch.lengths),
    }

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return attention


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Make a package impossible to import for a while, even if it is installed or imported already."""
    before = {n: sys.modules.pop(n) for n in list(sys.modules) if n == name or n.startswith(name + ".")}
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


def xformers(batch: Batch) -> Attention:
    """xformers, with key heads copied for every query head: for grouped heads xformers 0.0.35 has no backward."""
    # FlashAttention-4 installs a package flash_attn that lacks modules which xformers expects in it.
    with hidden("flash_attn"):
        function: Any = import_module("xformers.ops").memory_efficient_attention
        masks: Any = import_module("xformers.ops.fmha.attn_bias")
    (left, right), causal = batch.shape.window, batch.shape.causal
    if right not in (-1, 0) or (left != -1 and not causal):
        raise ValueError("xformers has windows for causal batches alone")
    bias = masks.BlockDiagonalMask.from_seqlens(list(batch.lengths), device=batch.q.device)
    if causal:
        bias = bias.make_causal() if left == -1 else bias.make_local_attention(left + 1)  # counting the query's key

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _for_every_head(q, k, v)
        return function(q[None], k[None], v[None], attn_bias=bias)[0]

    return attention


def document_mask(batch: Batch) -> Callable[..., Tensor]:
    """The mask function for FlexAttention: for documents as in its documentation, for trees by the ends of subtrees."""
    ends = batch.mask.query_stop
    if ends is not None:
        return lambda b, h, q, k: (k <= q) & (q < ends[k])
    (left, right), causal = batch.shape.window, batch.shape.causal
    if right not in (-1, 0) or (left != -1 and not causal):
        raise ValueError("the mask function for FlexAttention has windows for causal batches alone")
    document = torch.repeat_interleave(batch.cu_seqlens.diff())

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sees = document[q] == document[k]
        if causal:
            sees = sees & (k <= q)
        return sees & (q - k <= left) if left != -1 else sees

    return visible


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled anew for every size, as for training rows of one capacity: code for any size is slower."""
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # backward runs several times on one graph
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False)


def flex(batch: Batch) -> Attention:
    """FlexAttention, compiled on a GPU; on a CPU it isn't compiled and computes forward alone."""
    on_gpu, total = batch.q.is_cuda, batch.shape.tokens
    function: Any = _compiled(flex_attention) if on_gpu else flex_attention
    make: Any = _compiled(create_block_mask) if on_gpu else create_block_mask
    block_mask = make(document_mask(batch), None, None, total, total, device=batch.q.device.type)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if on_gpu else x.detach() for x in (q, k, v))
        return function(q, k, v, block_mask=block_mask, enable_gqa=True)

    return attention


def flex_with_mask(batch: Batch) -> Attention:
    """FlexAttention, which builds the block mask in each call, as for a batch of trees that no step repeats."""
    return lambda q, k, v: flex(batch)(q, k, v)


PEERS = (
    Peer(OURS, ours, on_cpu=True, trees=True),
    Peer("tritonpack, gluon", partial(ours, backend="gluon"), meant_for=lambda shape: shape.head_dim in (64, 128, 256)),
    Peer("FlashAttention-2 (torch)", torch_varlen),
    Peer("FlashAttention-3", partial(flash_attention, module="flash_attn_interface", unlimited=-1)),
    Peer("FlashAttention-4", partial(flash_attention, module="flash_attn.cute", unlimited=None)),
    Peer("xformers", xformers),
    Peer("FlexAttention", flex, one_row, trees=True),
    Peer("FlexAttention, mask built", flex_with_mask, one_row, meant_for=lambda shape: shape.trees, trees=True),
    Peer("sdpa, padded", sdpa_padded, padded, on_cpu=True),
    Peer("sdpa, dense mask", sdpa_dense_mask, one_row, on_cpu=True, trees=True),
)


def peers_for(shape: Shape, device: torch.device) -> list[Peer]:
    """The peers that are measured: those meant for the shape, on a CPU only a few of them."""
    return [peer for peer in PEERS if peer.fits(shape) and (peer.on_cpu or device.type == "cuda")]

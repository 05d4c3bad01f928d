"""What else a user could call: each peer takes the same packed tensors and returns the same packed output.

A peer is prepared for a batch (masks, indices, what is compiled) and gives a function of q, k and v, which is timed.

A peer that can't be imported, or refuses a shape, says so by raising; the ledger has the reason. Windows are counted in
different ways by different libraries, so whether an adapter reads one rightly is for the check of its results to say.
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

from benchmarks.gpu.shapes import NO_WINDOW, Batch, Shape
from tritonpack import BlockDiagonalMask, varlen_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Batch], Attention]

# Padding past this many times the tokens is no comparison any more, and the graphs of all peers are alive at once.
MOST_PADDING = 16
LARGEST_DENSE = 32768


@dataclass(frozen=True)
class Peer:
    """An implementation: its name in the ledger, what prepares a call of it, and the shapes it is meant for."""

    name: str
    prepare: Prepare
    meant_for: Callable[[Shape], bool] = lambda shape: True


# ------------------------------------------------------------------------------------------------------- tritonpack


def tritonpack_given(batch: Batch) -> Attention:
    backend: Any = "triton" if batch.q.is_cuda else "blocked"
    return lambda q, k, v: varlen_attention(q, k, v, batch.mask, backend=backend)


def tritonpack_built(batch: Batch) -> Attention:
    """The mask built anew in every call, as a training step's first layer does."""
    backend: Any = "triton" if batch.q.is_cuda else "blocked"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = BlockDiagonalMask.from_cu_seqlens(
            batch.cu_seqlens, causal=batch.causal, window=batch.window, total_q=q.shape[0]
        )
        return varlen_attention(q, k, v, mask, backend=backend)

    return attention


def tritonpack_gluon(batch: Batch) -> Attention:
    """The forward kernel for Hopper, which "auto" doesn't choose."""
    return lambda q, k, v: varlen_attention(q, k, v, batch.mask, backend="gluon")


# --------------------------------------------------------------------------- FlashAttention, in torch and by itself


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
    try:
        function: Any = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return True  # there is nothing to work around
    return "enable_gqa" in inspect.signature(function).parameters


def flash_attention_4(batch: Batch) -> Attention:
    """`flash_attn.cute`: None is a window side without limit, and out comes with lse."""
    function: Any = import_module("flash_attn.cute").flash_attn_varlen_func
    left, right = (None if side == -1 else side for side in batch.window)
    options: dict[str, Any] = {
        "cu_seqlens_q": batch.cu_seqlens,
        "cu_seqlens_k": batch.cu_seqlens,
        "causal": batch.causal,
        "window_size": (left, right),
    }
    names = inspect.signature(function).parameters
    options |= {name: max(batch.lengths) for name in ("max_seqlen_q", "max_seqlen_k") if name in names}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return attention


# --------------------------------------------------------------------------------------------------------- xformers


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """A package that can't be found for a while, though it is installed or even imported."""
    before = {n: sys.modules.pop(n) for n in list(sys.modules) if n == name or n.startswith(name + ".")}
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


def xformers(batch: Batch) -> Attention:
    """Grouped heads as five dimensions, which xformers 0.0.35 computes forward alone."""
    # FlashAttention-4 installs flash_attn without the modules that xformers expects where it finds that name.
    with hidden("flash_attn"):
        function: Any = import_module("xformers.ops").memory_efficient_attention
        masks: Any = import_module("xformers.ops.fmha.attn_bias")
    left, right = batch.window
    if right not in (-1, 0) or (left != -1 and not batch.causal):
        raise ValueError("xformers has windows for causal batches alone")
    bias = masks.BlockDiagonalMask.from_seqlens(list(batch.lengths), device=batch.q.device)
    if batch.causal:
        bias = bias.make_causal() if left == -1 else bias.make_local_attention(left + 1)  # it counts the query itself

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
        if heads == kv_heads:
            return function(q[None], k[None], v[None], attn_bias=bias)[0]
        groups = (1, tokens, kv_heads, heads // kv_heads, head_dim)
        ks, vs = (x[None, :, :, None].expand(groups) for x in (k, v))
        return function(q.view(groups), ks, vs, attn_bias=bias).reshape(q.shape)

    return attention


def repeated(prepare: Prepare) -> Prepare:
    """The peer with a copy of its key head for every query head, where it doesn't know groups."""

    def prepare_repeated(batch: Batch) -> Attention:
        attention, group = prepare(batch), batch.q.shape[1] // batch.k.shape[1]
        return lambda q, k, v: attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    return prepare_repeated


# ---------------------------------------------------------------------------------------------------- FlexAttention


def document_mask(batch: Batch) -> Callable[..., Tensor]:
    """What FlexAttention asks of each pair: its mask function, written as its documentation does for documents."""
    lengths = torch.tensor(batch.lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(batch.q.device)
    left, right = batch.window

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (k <= q)

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (k <= q) & (q - k <= left)

    if right not in (-1, 0) or ((left, right) != NO_WINDOW and not batch.causal):
        raise ValueError("windows of bidirectional batches aren't written for FlexAttention here")
    return window if left != -1 else causal if batch.causal else same


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled anew for every size, as it is in training with rows of one capacity: code for any size is slower."""
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # backward is run again and again on one graph
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False)


def flex(batch: Batch, *, build: bool = False) -> Attention:
    """FlexAttention, compiled on a GPU; on a CPU as it is, where it computes forward alone."""
    on_gpu, total = batch.q.is_cuda, batch.q.shape[0]
    function: Any = compiled(flex_attention) if on_gpu else flex_attention
    make: Any = compiled(create_block_mask) if on_gpu else create_block_mask
    visible = document_mask(batch)

    def block_mask() -> Any:
        return make(visible, None, None, total, total, device=batch.q.device.type)

    given = None if build else block_mask()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] if on_gpu else x.detach().transpose(0, 1)[None] for x in (q, k, v))
        out = function(q, k, v, block_mask=given if given is not None else block_mask(), enable_gqa=True)
        return out[0].transpose(0, 1)

    return attention


# ------------------------------------------------------------------------------------------------------------- sdpa


def fused_sdpa(device: torch.device) -> AbstractContextManager[Any]:
    """Bars the kernel that writes all scores to memory, on GPUs: it would be a straw man, where it fits at all."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel(fused) if device.type == "cuda" else nullcontext()


def sdpa_padded(batch: Batch) -> Attention:
    """Stock padded training: rows as long as the longest document, the packed rows gathered afterwards."""
    if batch.window != NO_WINDOW:
        raise ValueError("a padded batch with a window needs the dense mask, too")
    device, rows, width = batch.q.device, len(batch.lengths), max(batch.lengths)
    if rows * width > MOST_PADDING * batch.q.shape[0]:
        raise ValueError(f"{rows} rows of {width} would be {rows * width / batch.q.shape[0]:.0f} times the tokens")
    real = torch.arange(width, device=device)[None] < torch.tensor(batch.lengths, device=device)[:, None]
    index = real.flatten().nonzero().squeeze(1)

    def padded(x: Tensor) -> Tensor:
        flat = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, index, x)
        return flat.view(rows, width, *x.shape[1:]).transpose(1, 2)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not batch.causal:
            k, v = _for_every_head(q, k, v)
        q, k, v = (padded(x) for x in (q, k, v))
        with fused_sdpa(device):
            if batch.causal:
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                out = scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        return out.transpose(1, 2).flatten(0, 1)[index]

    return attention


def sdpa_dense_mask(batch: Batch) -> Attention:
    """What sdpa users get where packing is honoured: a dense T x T mask, and a copy of k and v for every query head."""
    tokens = batch.q.shape[0]
    if tokens > LARGEST_DENSE:
        raise ValueError(f"a dense mask of {tokens} x {tokens} is out of the question")
    dense = batch.mask.to_dense()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, *_for_every_head(q, k, v)))
        with fused_sdpa(q.device):
            return scaled_dot_product_attention(q, k, v, attn_mask=dense)[0].transpose(0, 1)

    return attention


def _for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as transformers' sdpa gives them where there is a mask: the kernels that take one don't know groups."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _grouped(shape: Shape) -> bool:
    return shape.heads != shape.kv_heads


OURS = "tritonpack"
PEERS = (
    Peer(OURS, tritonpack_given),
    Peer("tritonpack, mask built", tritonpack_built),
    Peer("tritonpack, gluon", tritonpack_gluon, lambda shape: shape.head_dim in (64, 128, 256)),
    Peer("FlashAttention-2 (torch)", torch_varlen),
    Peer(
        "FlashAttention-2 (torch), heads repeated",
        repeated(torch_varlen),
        lambda shape: _grouped(shape) and not torch_knows_groups(),
    ),
    Peer("FlashAttention-4", flash_attention_4),
    Peer("xformers", xformers),
    Peer("xformers, heads repeated", repeated(xformers), _grouped),
    Peer("FlexAttention", flex),
    Peer("FlexAttention, mask built", partial(flex, build=True)),
    Peer("sdpa, padded", sdpa_padded),
    Peer("sdpa, dense mask", sdpa_dense_mask),
)

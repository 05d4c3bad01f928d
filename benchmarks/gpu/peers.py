"""What else a user could call: those of `tritonpack bench`, and what may be installed on a machine that measures.

A peer has its tensors in a layout of its own; what is prepared once per batch isn't timed, but where its name says so.
Windows are counted in different ways by different libraries, so whether an adapter reads one rightly is for the check
of its results to say.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.shapes import Shape
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.cli.bench import peers
from tritonpack.cli.bench.batch import NO_WINDOW, Batch
from tritonpack.cli.bench.peers import OURS, SDPA, Attention, one_row, ours, repeated, torch_knows_groups, torch_varlen


@dataclass(frozen=True)
class Peer(peers.Peer):
    """A peer, and the shapes that it is meant for."""

    meant_for: Callable[[Shape], bool] = lambda shape: True


def tritonpack_built(batch: Batch) -> Attention:
    """The mask built anew in every call, as a training step's first layer does."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = BlockDiagonalMask.from_cu_seqlens(
            batch.cu_seqlens, causal=batch.causal, window=batch.window, total_q=q.shape[0]
        )
        return varlen_attention(q, k, v, mask)

    return attention


def tritonpack_gluon(batch: Batch) -> Attention:
    """The forward kernel for Hopper, which "auto" doesn't choose."""
    return lambda q, k, v: varlen_attention(q, k, v, batch.mask, backend="gluon")


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
        q, k, v = (x if on_gpu else x.detach() for x in (q, k, v))
        return function(q, k, v, block_mask=given if given is not None else block_mask(), enable_gqa=True)

    return attention


def _grouped(shape: Shape) -> bool:
    return shape.heads != shape.kv_heads


PEERS = (
    Peer(OURS, ours),
    Peer("tritonpack, mask built", tritonpack_built),
    Peer("tritonpack, gluon", tritonpack_gluon, meant_for=lambda shape: shape.head_dim in (64, 128, 256)),
    Peer("FlashAttention-2 (torch)", torch_varlen),
    Peer(
        "FlashAttention-2 (torch), heads repeated",
        repeated(torch_varlen),
        meant_for=lambda shape: _grouped(shape) and not torch_knows_groups(),
    ),
    Peer("FlashAttention-4", flash_attention_4),
    Peer("xformers", xformers),
    Peer("xformers, heads repeated", repeated(xformers), meant_for=_grouped),
    Peer("FlexAttention", flex, one_row),
    Peer("FlexAttention, mask built", partial(flex, build=True), one_row),
    *(Peer(peer.name, peer.prepare, peer.layout) for peer in SDPA),
)

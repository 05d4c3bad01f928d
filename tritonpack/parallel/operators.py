"""Attention among ranks as operators `tritonpack::shared_attention` and `tritonpack::shared_attention_backward`.

Operators are opaque to `torch.compile`: it calls them without ending its graph. A graph can't hold process groups, and
it shall fit every batch. So operators get a number of a registry, which holds the group, the mask and the layout of a
batch. The number is a tensor, because a graph is compiled for each value of a Python number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonpack.attention import Backend, autocast
from tritonpack.backends import resolve_backend
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.ops import define_operator
from tritonpack.options import AttentionOptions, make_options
from tritonpack.parallel.attention import EXCHANGED, attend, check_options, check_shard, check_stride, make_call
from tritonpack.parallel.dimensions import dimensions_of
from tritonpack.parallel.exchanges import ulysses
from tritonpack.parallel.exchanges.merge import exact
from tritonpack.parallel.shard_and_gather import Sharding

_NUMBERS = count()
_SHARED: WeakValueDictionary[int, SharedAttention] = WeakValueDictionary()


class SharedAttention:
    """The attention of all layers of one kind over a batch that ranks share.

    Attributes:
        ran: whether a layer has called it.
        rows: how many rows a rank has while it computes some of the heads: those of all ranks that divide heads.
        rank, size: this process's number among the ranks that divide heads, and how many these are; 0 and 0 if this
            rank computes all heads.
        divides_groups: as in `Call`.
    """

    def __init__(self, mask: BlockDiagonalMask, sharding: Sharding, backend: Backend) -> None:
        self.mask, self.sharding, self.backend = mask, sharding, backend
        self.ran = False
        self.dimensions = dimensions = dimensions_of(sharding.ranks, sharding.exchange)
        lengths = sharding.layout.lengths
        keys, heads = dimensions.keys, dimensions.heads or sharding.ranks
        across = keys is not None and dimensions.heads is not None
        owners = dimensions.owners[keys.rank] if across and keys is not None else range(len(lengths))
        self.rows, self.divides_groups = sum(lengths[rank] for rank in owners), not across
        self.rank, self.size = (heads.rank, heads.size) if dimensions.divides_heads else (0, 0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float = 0.0,
        sinks: Tensor | None = None, dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """As `attend`."""
        sharding = self.sharding
        self.ran = True
        return attend(
            q, k, v, self.mask, sharding.layout, sharding.ranks, exchange=sharding.exchange,
            heads_k_stride=sharding.heads_k_stride, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            backend=self.backend,
        )  # fmt: skip

    def call(self, q: Tensor, kv_heads: int, options: AttentionOptions) -> Any:
        """The arguments of the exchange."""
        sharding = self.sharding
        return make_call(
            self.mask, sharding.layout, sharding.ranks, self.dimensions, options, resolve_backend(self.backend, q),
            sharding.heads_k_stride, kv_heads,
        )  # fmt: skip


def register(shared: SharedAttention) -> Tensor:
    """() int64 in host memory: the number of `shared` in the registry.

    The tensor keeps `shared` alive: graphs save it for backward, when the masks of the batch are gone.
    """
    value = next(_NUMBERS)
    _SHARED[value] = shared
    number = torch.tensor(value, device="cpu")
    number.shared = shared  # type: ignore[attr-defined]
    return number


def attend_in_graph(
    shared: SharedAttention, number: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """As `shared(...)`, for functions that are being compiled. `number` is that of `shared`.

    The operator checks its arguments when it runs.
    """
    q, k, v = autocast(q, k, v)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    heads = shared.rows, shared.rank, shared.size, shared.divides_groups
    return shared_attention(q, k, v, sinks, number, *heads, save, scale, softcap, dropout_p)[0]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, number: Tensor, rows: int, rank: int, size: int,
    divides_groups: bool, save: bool, scale: float | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    shared = _SHARED[int(number)]
    shared.ran = True
    sharding = shared.sharding
    check_shard(q, k, v, shared.mask, sharding.layout, sharding.ranks)
    check_options(shared.dimensions, q.shape[1], dropout_p)
    check_stride(sharding.heads_k_stride, sharding.exchange, k.shape[1])
    options = make_options(q, shared.mask, scale=scale, softcap=softcap, sinks=sinks)
    call, sinks = shared.call(q, k.shape[1], options), options.sinks
    if shared.dimensions.divides_heads:
        out, _, saved = ulysses.forward(call, q, k, v, sinks, want_lse=False, save=save)
    else:
        out, lse = EXCHANGED[shared.dimensions.exchange].forward(call, q, k, v, sinks)
        saved = [lse] if save else []
    return out.contiguous(), _separate(saved)


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, number: Tensor, rows: int, rank: int, size: int,
    divides_groups: bool, save: bool, scale: float | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    out, wide = q.new_empty(q.shape[0], q.shape[1], v.shape[2]), exact(q.dtype)
    if not save:
        return out, []
    if not size:
        return out, [q.new_empty(q.shape[1], q.shape[0], dtype=wide)]
    return out, ulysses.empty_saved(q, k, v, rows, rank, size, divides_groups)


def _attention_backward(
    dout: Tensor, saved: Sequence[Tensor], sinks: Tensor | None, number: Tensor, size: int, kv_heads: int,
    scale: float | None, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shared = _SHARED[int(number)]
    call = shared.call(saved[0], kv_heads, make_options(saved[0], shared.mask, scale=scale, softcap=softcap))
    wide = None if sinks is None else sinks.to(exact(dout.dtype))
    if shared.dimensions.divides_heads:
        *gradients, dsinks = ulysses.backward(call, kv_heads, dout, None, saved, wide)
    else:
        q, k, v, out, lse = saved
        exchange = EXCHANGED[shared.dimensions.exchange]
        *gradients, dsinks = exchange.backward(call, dout, None, q, k, v, wide, out, lse)
    dq, dk, dv = (x.contiguous() for x in gradients)
    return dq, dk, dv, dout.new_empty(0) if sinks is None or dsinks is None else dsinks.to(sinks.dtype)


def _attention_backward_fake(
    dout: Tensor, saved: Sequence[Tensor], sinks: Tensor | None, number: Tensor, size: int, kv_heads: int,
    scale: float | None, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = saved[:3]
    (rows, heads, _), new = dout.shape, q.new_empty
    dsinks = dout.new_empty(0) if sinks is None else torch.empty_like(sinks)
    shapes = (heads, q.shape[2]), (kv_heads, k.shape[2]), (kv_heads, v.shape[2])
    dq, dk, dv = (new(rows, *shape) for shape in shapes)
    return dq, dk, dv, dsinks


def _separate(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors that share no memory, as results of operators. Chunks of heads may share keys."""
    found, results = set(), []
    for x in tensors:
        x = x.contiguous()
        memory = x.untyped_storage().data_ptr()
        results.append(x.clone() if memory in found else x)
        found.add(memory)
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    q, k, v, sinks, number, _, _, size, _, _, scale, softcap, _ = inputs
    out, saved = output
    ctx.save_for_backward(number, sinks, *(saved if size else (q, k, v, out, *saved)))
    ctx.others = size, k.shape[1], scale, softcap
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    number, sinks, *saved = ctx.saved_tensors
    dq, dk, dv, dsinks = shared_attention_backward(dout, saved, sinks, number, *ctx.others)
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * 9


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("attention among ranks has no second derivative, but its backward was differentiated.")


# A replayed graph of CUDA would exchange as the batch of its capture did. Early versions of torch have no such tag.
_TAGS = tuple(tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None)
shared_attention = define_operator(
    "shared_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor number, SymInt rows, int rank, int size, "
    "bool divides_groups, bool save, float? scale, float softcap, float dropout_p) -> (Tensor, Tensor[])",
    _attention, _attention_fake, _differentiate, _save, _TAGS,
)  # fmt: skip
shared_attention_backward = define_operator(
    "shared_attention_backward(Tensor dout, Tensor[] saved, Tensor? sinks, Tensor number, int size, int kv_heads, "
    "float? scale, float softcap) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward, _attention_backward_fake, _no_second_derivative, tags=_TAGS,
)  # fmt: skip

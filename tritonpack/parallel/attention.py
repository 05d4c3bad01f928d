"""`attend`: attention over a batch whose rows are divided among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.attention import Backend, check_inputs
from tritonpack.backends import resolve_backend
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.ops import autocast, run_attention
from tritonpack.options import AttentionOptions, make_options
from tritonpack.parallel.comm import as_ranks
from tritonpack.parallel.dimensions import Dimensions, Exchanges, dimensions_of
from tritonpack.parallel.exchanges import by_heads, ring
from tritonpack.parallel.exchanges.call import Call, rows_mask, sink_gradients
from tritonpack.parallel.exchanges.ulysses import attend_to_heads
from tritonpack.parallel.layouts import Layout
from tritonpack.removed import refuse_removed

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

EXCHANGED = {"auto": by_heads, "all_gather": by_heads, "group_cast": by_heads, "ring": ring}


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, layout: Layout, group: GroupLike = None, *,
    exchange: Exchanges = "auto", scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, backend: Backend = "auto", **removed: Any,
) -> Tensor:  # fmt: skip
    """This rank's rows of `varlen_attention` over the whole batch. Every rank of the group makes the same call.

    Outputs and gradients are as in one process, up to rounding, for any exchange and layout. Backward exchanges,
    too, so it must run on every rank. Gradients of q, k and v are exact for the sum of the ranks' losses.

    - "auto": "group_cast" if no rank sees more keys of others than the longest shard has rows, else "all_gather". So
      neither a rank nor a node receives more bytes than with "all_gather" alone. It counts keys once per mask, which
      waits for the mask's device. For a mask of trees it takes "all_gather".
    - "all_gather": every rank receives all keys and values, a quarter of the key heads at a time.
    - "group_cast": every rank receives the keys and values that its queries see, and no others, in such steps; the
      layout "documents" makes them few. No mask of trees. Which rows travel is found once per mask, in host memory,
      which waits for the mask's device.
    - "ring": blocks of keys and values travel from rank to rank. Least memory.
    - "ulysses": each rank computes some heads over all rows. Fewest bytes at many ranks; needs a head for each rank.

    Args:
        q: (n, H, D), this rank's n rows, `layout.shard` of the batch's; dtypes as in `varlen_attention`.
        k: (n, H_kv, D), the keys of the same rows.
        v: (n, H_kv, D_v), the values of the same rows.
        mask: the mask of the whole batch, with the layout's rows as queries and keys; on q's device, equal on all
            ranks.
        layout: which rows each rank of the group owns, equal on all ranks. Pass the same mask and layout to all layers:
            the masks between ranks are cached on the mask. Ranks of a mesh of two dimensions count row by row.
        group: a process group, a DeviceMesh of one or two dimensions, or None for the whole world.
        exchange: one of the names above. For a mesh of two dimensions, a pair with "ulysses" for the dimension along
            which ranks divide heads, and another name for the other, such as ("group_cast", "ulysses").
        scale, softcap, alibi_slopes, backend: as in `varlen_attention`.
        sinks: as in `varlen_attention`, all heads on every rank. Each rank gets its part of their gradient: sum it over
            ranks.
        dropout_p: must be 0.0, because the dropped pairs would depend on the layout.

    Raises:
        ValueError: what `varlen_attention` refuses; a mask, layout, group and tensors that don't fit each other; an
            unknown exchange, or an option that it can't compute. A rank whose tensors don't fit raises alone.
        BackendUnavailableError: (a ValueError) the backend can't run here.
    """
    refuse_removed(removed, "attend()")
    whole = dimensions_of(as_ranks(group, dimensions=2), exchange), mask, layout
    q, k, v = autocast(q, k, v)
    checked = check_call(
        *whole, q, k, v, backend, dropout_p, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes
    )
    return run_shared(*whole, q, k, v, *checked)


def check_call(
    dimensions: Dimensions, mask: BlockDiagonalMask, layout: Layout, q: Tensor, k: Tensor, v: Tensor,
    backend: Backend, dropout_p: float, **options: Any,
) -> tuple[AttentionOptions, str]:  # fmt: skip
    """The options and the backend of a call of `attend`; raises for what it refuses."""
    ranks, heads, keys = dimensions.ranks, dimensions.heads, dimensions.keys
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be a Layout, as make_layout makes it; got {type(layout).__name__}.")
    if not isinstance(mask, BlockDiagonalMask):
        raise ValueError(f"mask must be a tritonpack.BlockDiagonalMask of the whole batch; got {type(mask).__name__}.")
    if layout.ranks != ranks.size:
        raise ValueError(f"the layout is for {layout.ranks} ranks, and the group has {ranks.size}; make one for it.")
    if not mask.num_queries == mask.num_keys == layout.num_rows:
        raise ValueError(
            f"the mask must cover the whole batch, with the layout's {layout.num_rows} rows as queries and keys; "
            f"got {mask.num_queries} queries and {mask.num_keys} keys."
        )
    rows = layout.lengths[ranks.rank]
    if isinstance(q, Tensor) and q.ndim == 3 and q.shape[0] != rows:
        raise ValueError(
            f"rank {ranks.rank} owns {rows} of the layout's {layout.num_rows} rows, but q has {q.shape[0]}; pass "
            f"layout.shard(q, {ranks.rank})."
        )
    if dropout_p:
        raise ValueError(
            f"dropout_p must be 0.0 in sequence parallelism; got {dropout_p!r}. Which pairs are dropped depends on "
            "their places in a tensor, which differ from rank to rank."
        )
    check_inputs(q, k, v, rows_mask(mask, layout, ranks.rank, ranks.rank))
    if heads is not None and q.shape[1] < heads.size:
        raise ValueError(
            f"exchange='ulysses' gives every rank a query head, and there are {q.shape[1]} for {heads.size} ranks; "
            "use exchange='all_gather', 'group_cast' or 'ring', or divide heads among fewer ranks."
        )
    seen = mask
    if keys is not None and options.get("alibi_slopes") is not None:  # per document of the rows
        seen = rows_mask(mask, dimensions.layouts(mask, layout)[0], keys.rank)
    return make_options(q, seen, **options), resolve_backend(backend, q)


def run_shared(
    dimensions: Dimensions, mask: BlockDiagonalMask, layout: Layout, q: Tensor, k: Tensor, v: Tensor,
    options: AttentionOptions, backend: str,
) -> Tensor:  # fmt: skip
    """`attend` after its checks, which are the same for layers that are alike."""
    (across, within), heads, keys = dimensions.layouts(mask, layout), dimensions.heads, dimensions.keys

    def attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Some heads of the rows that the ranks which divide heads own together."""
        if keys is None:
            return run_attention(q, k, v, mask, options, backend)[0]
        call = Call(dimensions.exchange, keys, across, mask, replace(options, sinks=None), backend)
        return _Exchanged.apply(call, q, k, v, options.sinks)

    return attention(q, k, v, options) if heads is None else attend_to_heads(attention, heads, within, q, k, v, options)


class _Exchanged(torch.autograd.Function):
    """(call, q, k, v, sinks) -> out (n, H, D_v) of this rank's n rows."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        out, lse = EXCHANGED[call.exchange].forward(call, *tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks, out, lse = ctx.saved_tensors
        dsinks = None if sinks is None else sink_gradients(sinks, dout, out, lse)
        return None, *EXCHANGED[ctx.call.exchange].backward(ctx.call, dout, *tensors, out, lse), dsinks

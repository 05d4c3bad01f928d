"""The backend "blocked": attention in torch with O(T) memory, which skips blocks without visible keys.

It is the default without a GPU. A plan, made once per mask, lists how each document is computed. On CPUs torch's fused
kernel (fused.py) computes documents with full or causal attention. Other documents are computed block by block, with
the algorithm of the Triton kernels in a form that is easier to read. Queries are cut into tiles of up to `BLOCK_ROWS`
rows. A tile is computed in blocks of up to `BLOCK_KEYS` keys, from the first to the last key that its rows see; in a
tree, blocks of keys that no row sees are left out. The host reads the mask for the plan, so on an accelerator this
backend waits.

Shapes: T tokens, H heads, n key heads, d head dimension. A group is the query heads that share a key head. A token has
    a
row for each head of a group: r rows in all, m rows and k keys in a block.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.backends import fused
from tritonpack.backends.dropout import keep_mask
from tritonpack.backends.tile_table import NO_TABLES, TileTables
from tritonpack.checks import on_host
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.forms import aligned, cut, relation
from tritonpack.options import AttentionOptions

BLOCK_ROWS = 128
BLOCK_KEYS = 512  # the scores of a block with eight heads take 2 MiB, which fits into caches
PIECE = 64  # unit of blocks in a tree, in keys

LOG2E = 1 / math.log(2)

# Kinds of blocks in the table of a plan; smaller numbers are the kinds of runs in fused.py.
FULL, MASKED = 3, 4


class Block(NamedTuple):
    """A tile of queries and a block of keys; `masked` if some query doesn't see all of these keys."""

    queries: slice
    keys: slice
    masked: bool


class Plan(NamedTuple):
    """The blocks and the fused calls that compute attention with a mask.

    Attributes:
        blocks: the blocks, ordered by tile.
        empty, unseen: (queries, 1, 1) and (keys, 1, 1) bool, the queries that see no key and the keys that no query
            sees; None if there are none.
        runs: the calls of the fused kernel.
        one_run: whether a single run has all queries and all keys.
    """

    blocks: list[Block]
    empty: Tensor | None
    unseen: Tensor | None
    runs: list[fused.Run]
    one_run: bool


def check_device(q: Tensor) -> None:
    """Accept any device and dtype."""


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """Make the plan, once per mask; no table if the mask can't be read now, as under torch.compile."""
    return read_plan(q, k, mask, options, None) if on_host(mask.key_start) else NO_TABLES


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables = NO_TABLES
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D_v) in q's dtype and lse (H, T_q) in float32 or float64, all in this wider dtype."""
    plan, dtype, head_dim_v = tiles.plan or read_plan(q, k, mask, options, tiles.blocks).plan, q.dtype, v.shape[2]
    q, k, v = _widened(options, q, k, v)
    if plan.one_run:
        out, lse = fused.forward(plan.runs[0], q, k, v, options)
    else:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if plan.blocks:
            out, lse = _forward_blocks(plan, q, k, v, mask, options)
        else:
            out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -math.inf)
        for run in plan.runs:
            rows, keys = run.rows, run.keys
            out[rows], lse[:, rows] = fused.forward(run, q[rows], k[keys], v[keys], options)
    if options.pack_invariant:
        out = out[..., :head_dim_v]
    return out if out.dtype == dtype else out.to(dtype), lse


def _forward_blocks(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D_v) and lse (H, T_q) of the blocks; other rows are zeros and -inf."""
    qs, ks, vs = _rows_first(plan, q, k, v)
    out = qs.new_zeros(*qs.shape[:2], v.shape[2])
    m_i = qs.new_full((*qs.shape[:2], 1), -math.inf)  # the largest score so far, [n, r, 1]
    l_i = torch.zeros_like(m_i)
    sinks = None if options.sinks is None else _rows(options.sinks.to(q.dtype).expand(q.shape[:2]), ks)[..., None]
    if sinks is not None and not mask.is_tree:  # a sink is the first key of every row
        m_i.copy_(sinks)
        l_i.fill_(1.0)
    scratch, group = q.new_empty(q.shape[1] * BLOCK_ROWS * BLOCK_KEYS), q.shape[1] // k.shape[1]
    for block in plan.blocks:
        rows = slice(block.queries.start * group, block.queries.stop * group)
        m_old = m_i[:, rows]
        scores, _ = _scores(qs[:, rows], ks, mask, block, options, scratch)  # [n, m, k]
        m_new = torch.maximum(m_old, scores.amax(-1, keepdim=True))
        # The maximum of a row without a key so far is -inf. With 0 in its place its exponentials are all exp(-inf) = 0.
        pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
        p = scores.sub_(pivot).mul_(LOG2E).exp2_()
        alpha = m_old.sub(pivot).mul_(LOG2E).exp2_()
        l_i[:, rows].mul_(alpha).add_(p.sum(-1, keepdim=True))
        kept = _dropped(p, block, options) if options.dropout_p else p
        out[:, rows].mul_(alpha).add_(kept @ vs[:, block.keys])
        m_old.copy_(m_new)
    if sinks is not None and not mask.is_tree:
        l_i.masked_fill_((mask.key_start == mask.key_stop).repeat_interleave(group)[:, None], 0.0)
    elif sinks is not None:  # in a tree, whose bounds don't show which rows see a key, it is the last key
        m_old, m_i = m_i, torch.maximum(m_i, sinks)
        alpha = m_old.sub(m_i).mul_(LOG2E).exp2_()
        l_i.mul_(alpha).add_(sinks.sub(m_i).mul_(LOG2E).exp2_()).masked_fill_(m_old == -math.inf, 0.0)
        out *= alpha
    out /= l_i.masked_fill(l_i == 0.0, 1.0)
    return _tokens_first(out, q), _tokens_first(m_i + l_i.log(), q)[..., 0].T  # lse is -inf in rows that see nothing


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockDiagonalMask,
    options: AttentionOptions,
    tiles: TileTables = NO_TABLES,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v, sinks (docs/math.md, section 3)."""
    plan = tiles.plan or read_plan(q, k, mask, options, tiles.blocks).plan
    dtype, head_dim, head_dim_v = q.dtype, q.shape[2], v.shape[2]
    dout, q, k, v, out = _widened(options, dout, q, k, v, out)
    if plan.one_run:
        dq, dk, dv = fused.backward(plan.runs[0], dout, dlse, q, k, v, out, lse, options)
    else:
        dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))
        if plan.blocks:
            dq, dk, dv = _backward_blocks(plan, dout, dlse, q, k, v, out, lse, mask, options)
        else:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for run in plan.runs:
            rows, keys = run.rows, run.keys
            dlse_of_run = None if dlse is None else dlse[:, rows]
            dq[rows], dk_of_run, dv_of_run = fused.backward(
                run, dout[rows], dlse_of_run, q[rows], k[keys], v[keys], out[rows], lse[:, rows], options
            )
            dk[keys] += dk_of_run
            dv[keys] += dv_of_run
    dsinks = None
    if options.sinks is not None:
        delta = (dout * out).sum(-1).T
        if dlse is not None:
            delta -= dlse
        share = torch.exp(options.sinks[:, None] - lse)  # inf in rows that see nothing
        dsinks = -(share * delta).masked_fill_(lse == -math.inf, 0.0).sum(1).to(options.sinks.dtype)
    dq, dk, dv = dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks


def _backward_blocks(
    plan: Plan,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockDiagonalMask,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq (T_q, H, D), dk (T_k, n, D) and dv (T_k, n, D_v) of the blocks; other rows are zeros."""
    qs, ks, vs = _rows_first(plan, q, k, v)
    delta = (out * dout).sum(-1) if dlse is None else (out * dout).sum(-1) - dlse.T
    if plan.empty is not None:
        dout, delta = dout.masked_fill(plan.empty, 0.0), delta.masked_fill(plan.empty[..., 0], 0.0)
    douts, delta = _rows(dout, ks), _rows(delta, ks)[..., None]
    # Rows that see nothing have +inf, so that their probabilities are 0.
    lse = _rows(lse.masked_fill(lse == -math.inf, math.inf).T, ks)[..., None]
    dqs, dks, dvs = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    scratch, group = q.new_empty(q.shape[1] * BLOCK_ROWS * BLOCK_KEYS), q.shape[1] // k.shape[1]
    scratch_dp = torch.empty_like(scratch)
    for block in plan.blocks:
        rows, keys = slice(block.queries.start * group, block.queries.stop * group), block.keys
        scores, slope = _scores(qs[:, rows], ks, mask, block, options, scratch)
        p = scores.sub_(lse[:, rows]).mul_(LOG2E).exp2_()  # [n, m, k]
        dp = _times_into(scratch_dp, douts[:, rows], vs[:, keys].mT)
        if options.dropout_p:
            dp = _dropped(dp, block, options)
        ds = dp.sub_(delta[:, rows]).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        kept = _dropped(p, block, options) if options.dropout_p else p
        dvs[:, keys] += kept.mT @ douts[:, rows]
        dks[:, keys] += ds.mT @ qs[:, rows]
        dqs[:, rows] += ds @ ks[:, keys]
    dqs *= options.scale
    dks *= options.scale
    return _tokens_first(dqs, q), dks.transpose(0, 1), dvs.transpose(0, 1)


def read_plan(
    q: Tensor, k: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, table: Tensor | None
) -> TileTables:
    """Return the plan of a call, from its table or made now, once per mask. Waits for the mask's device."""
    fuse, pack_invariant = fused.supports(q, k, options), options.pack_invariant
    return mask.cached(("plan", fuse, pack_invariant), partial(_plan, mask, fuse, pack_invariant, table))


def _plan(mask: BlockDiagonalMask, fuse: bool, pack_invariant: bool, table: Tensor | None) -> TileTables:
    if table is None:
        table = torch.tensor(plan_rows(mask, fuse, pack_invariant), dtype=torch.int64, device="cpu").view(-1, 5)
    blocks, runs = [], []
    for row, row_end, key, key_end, kind in table.tolist():
        if kind < FULL:
            runs.append(fused.Run(row, row_end, key, key_end, kind))
        else:
            blocks.append(Block(slice(row, row_end), slice(key, key_end), kind == MASKED))
    one_run = not blocks and len(runs) == 1 and runs[0][:4] == (0, mask.num_queries, 0, mask.num_keys)
    empty = unseen = None
    if blocks:
        transposed = mask.transpose()
        rows, keys = mask.key_start == mask.key_stop, transposed.key_start == transposed.key_stop
        empty = rows[:, None, None] if bool(rows.any()) else None
        unseen = keys[:, None, None] if bool(keys.any()) else None
    return TileTables(None, None, None, table, Plan(blocks, empty, unseen, runs, one_run))


def plan_rows(mask: BlockDiagonalMask, fuse: bool, pack_invariant: bool) -> list[tuple[int, int, int, int, int]]:
    """Return the table of a plan: row, row_end, key, key_end and kind of each block and each run.

    Args:
        fuse: whether the fused kernel computes the documents that it supports.
        pack_invariant: whether no tile may hold two documents.
    """
    documents = fused.documents_of(mask)
    if not fuse or mask.is_tree:
        documents = [run._replace(seen=fused.OTHER) for run in documents]
    plan: list[tuple[int, int, int, int, int]] = []
    if tiles := _tiles(documents, pack_invariant):
        rows = torch.tensor(tiles, dtype=torch.int64, device=mask.key_start.device)
        plan += _cut_tree(mask, rows) if mask.is_tree else _cut_tiles(mask, rows)
    for document in documents:
        if document.seen != fused.OTHER:
            plan += fused.pieces(document)
    return plan


def _cut_tiles(mask: BlockDiagonalMask, tiles: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Return the blocks of tiles [first, end), (tiles, 2), in a mask without trees."""
    first, last = tiles[:, 0], tiles[:, 1] - 1
    start, stop = mask.key_start, mask.key_stop
    # A tile sees the keys from its first row's start to its last row's stop. All of its rows see the keys from the last
    # row's start to the first row's stop (docs/math.md, section 1).
    bounds = torch.stack([start[first], stop[last], start[last], stop[first]], 1)
    blocks = []
    for (row, row_end), (begin, end, common, common_end) in zip(tiles.tolist(), bounds.tolist(), strict=True):
        for key in range(begin, end, BLOCK_KEYS):
            key_end = min(key + BLOCK_KEYS, end)
            kind = FULL if common <= key < key_end <= common_end else MASKED
            blocks.append((row, row_end, key, key_end, kind))
    return blocks


def _cut_tree(mask: BlockDiagonalMask, tiles: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Return the blocks of tiles in a mask of trees: neighbouring pieces of `PIECE` keys of one kind are joined."""
    assert mask.query_start is not None
    assert mask.query_stop is not None
    queries = cut(mask.key_start, mask.key_stop, tiles[:, 0], tiles[:, 1], BLOCK_ROWS)
    visited, full = relation(queries, aligned(mask.query_start, mask.query_stop, PIECE))
    kind = pad(visited.to(torch.int8) + full, (1, 1))  # 0, 1 or 2 of each piece; a 0 around each tile's row
    begins = kind != kind.roll(1)
    begins[:, 1 :: BLOCK_KEYS // PIECE] = True
    kind, width = kind.flatten(), kind.shape[1]
    begins = begins.flatten().nonzero().flatten()
    lengths = begins.diff(append=begins.new_full((1,), kind.shape[0]))
    kept = kind[begins] > 0
    begins, lengths = begins[kept], lengths[kept]
    key = (begins % width - 1) * PIECE
    key_end = (key + lengths * PIECE).clamp(max=mask.num_keys)
    kinds = torch.where(kind[begins] == 1, MASKED, FULL)
    return torch.stack([*tiles[begins // width].T, key, key_end, kinds], 1).tolist()


def _tiles(documents: list[fused.Run], pack_invariant: bool) -> list[tuple[int, int]]:
    """Return the rows [first, end) of each tile, for the documents that the fused kernel doesn't compute.

    Documents share a tile while they fit, unless results must be `pack_invariant`. A longer document begins a tile, and
    so does a document after one of the fused kernel. Rows that see no key, before and after the documents of a tile,
    are left out.
    """
    tiles, first, last_end = [], 0, 0  # the open tile has the documents that lie in rows [first, last_end)
    for begin, end, _, _, kind in documents:
        if first == last_end or kind != fused.OTHER or pack_invariant or end - first > BLOCK_ROWS:
            if first < last_end:
                tiles.append((first, last_end))
            first = last_end = begin
        if kind != fused.OTHER:
            continue
        while end - first > BLOCK_ROWS:
            tiles.append((first, first + BLOCK_ROWS))
            first += BLOCK_ROWS
        last_end = end
    return [*tiles, (first, last_end)] if first < last_end else tiles


def _scores(
    qs: Tensor, ks: Tensor, mask: BlockDiagonalMask, block: Block, options: AttentionOptions, scratch: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute scores [n, m, k] of the rows qs [n, m, d] of a block, -inf for hidden keys, and their derivative by the
    scaled product (None: 1)."""
    queries = block.queries
    group = qs.shape[1] // (queries.stop - queries.start)
    scores = _times_into(scratch, qs, ks[:, block.keys].mT, options.scale)
    keys = torch.arange(block.keys.start, block.keys.stop, device=qs.device)
    slope = None
    if options.softcap:
        capped = scores.div_(options.softcap).tanh_()
        slope = 1 - capped * capped
        scores = capped.mul_(options.softcap)
    by_head = scores.unflatten(1, (-1, group))  # [n, queries, heads of a group, k], a view
    if options.alibi_slopes is not None:
        assert mask.diagonal is not None
        places = keys if mask.key_places is None else mask.key_places[block.keys]
        distance = (mask.diagonal[queries, None] - places).abs()
        slopes = options.alibi_slopes.expand(mask.num_queries, -1)[queries].unflatten(1, (-1, group))
        by_head -= slopes.transpose(0, 1)[..., None] * distance[:, None]
    if block.masked:  # torch.minimum is much faster than masked_fill
        seen = (keys >= mask.key_start[queries, None]) & (keys < mask.key_stop[queries, None])
        if mask.query_start is not None and mask.query_stop is not None:
            rows = torch.arange(queries.start, queries.stop, device=qs.device)[:, None]
            seen &= (rows >= mask.query_start[block.keys]) & (rows < mask.query_stop[block.keys])
        torch.minimum(by_head, torch.where(seen, math.inf, -math.inf)[:, None], out=by_head)
    return scores, slope


def _dropped(x: Tensor, block: Block, options: AttentionOptions) -> Tensor:
    """Apply dropout in place: x [n, m, k] times 0 or 1 / (1 - p)."""
    assert options.dropout_seed is not None
    queries = torch.arange(block.queries.start, block.queries.stop, device=x.device)
    keys = torch.arange(block.keys.start, block.keys.stop, device=x.device)
    group = x.shape[1] // queries.shape[0]
    heads = torch.arange(x.shape[0] * group, device=x.device).expand(queries.shape[0], -1)
    rows = _rows(heads, x)[..., None], queries.repeat_interleave(group)[:, None]
    keep = keep_mask(options.dropout_seed, *rows, keys, options.dropout_p)
    return x.masked_fill_(~keep, 0.0).div_(1 - options.dropout_p)


def _rows_first(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [n, r, d], k and v [n, T_k, d], with zeros for queries that see no key and keys that no query sees,
    because 0 * NaN is NaN."""
    if plan.empty is not None:
        q = q.masked_fill(plan.empty, 0.0)
    if plan.unseen is not None:
        k, v = k.masked_fill(plan.unseen, 0.0), v.masked_fill(plan.unseen, 0.0)
    ks = k.transpose(0, 1)
    return _rows(q, ks), ks, v.transpose(0, 1)


def _rows(x: Tensor, ks: Tensor) -> Tensor:
    """Turn (T, H, ...) into [n, r, ...] for keys [n, ...]: the heads of a token that share a key head are
    neighbours."""
    return x.unflatten(1, (ks.shape[0], -1)).transpose(0, 1).flatten(1, 2)


def _tokens_first(x: Tensor, q: Tensor) -> Tensor:
    """Turn [n, r, ...] into (T, H, ...) for q (T, H, d): the inverse of `_rows`."""
    return x.unflatten(1, (q.shape[0], -1)).transpose(0, 1).flatten(1, 2)


def _widened(options: AttentionOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors (T, H, D) of one dtype in float32, or float64 if they are float64.

    With `pack_invariant` D is padded with zeros and the tensor may be copied, so that each row begins at a multiple of
    16 bytes. From other addresses the matrix library may sum in another order.
    """
    if tensors[0].dtype not in (torch.float32, torch.float64):
        tensors = tuple(x.float() for x in tensors)
    if options.pack_invariant:
        wide = (pad(x, (0, -x.shape[2] % (16 // x.element_size()))).contiguous() for x in tensors)
        tensors = tuple(x.clone() if x.data_ptr() % 16 else x for x in wide)
    return tensors


def _times_into(scratch: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """Compute x @ y * scale in a part of `scratch`, which has room for a block's scores. Allocating it for every block
    would take a tenth of the time, mostly page faults."""
    shape = (*x.shape[:2], y.shape[2])
    out = scratch[: math.prod(shape)].view(shape)
    return torch.baddbmm(out, x, y, beta=0, alpha=scale, out=out)

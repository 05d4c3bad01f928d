"""Attention in torch: O(T) memory, and work only where a query sees a key.

The default without a GPU. A plan, which is made once per mask, says how each document is computed. On CPUs documents
whose queries see all keys, or those up to their own, go to torch's fused kernel (fused.py). All else is computed block
by block. This has the algorithm of the Triton kernels, in a form that is easier to read: the queries are cut into tiles
of up to `BLOCK_ROWS` rows, and a tile is computed in blocks of up to `BLOCK_KEYS` keys, from the first key that its
rows see to the last; in a tree, the keys between that no row sees are left out. The host reads the mask for the plan,
so on an accelerator this backend waits.

Shapes: t tokens, h heads, d head dimension; n key heads, g query heads per key head; m rows and k keys of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.backends import fused
from tritonpack.backends.dropout import keep_mask
from tritonpack.backends.tile_table import NO_TABLES, TileTables
from tritonpack.checks import on_host
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.blocks import aligned, cut, relation
from tritonpack.options import AttentionOptions

BLOCK_ROWS = 128
BLOCK_KEYS = 512  # a block's scores of eight heads are then 2 MiB, what caches hold
PIECE = 64  # keys, the unit of blocks in a tree

LOG2E = 1 / math.log(2)

# Kinds of blocks in the table of a plan, beside what the runs of fused.py see.
FULL, MASKED = 3, 4


class Block(NamedTuple):
    """The rows of a tile and some of the keys that they see; `masked` if a row doesn't see all of these keys."""

    rows: slice
    keys: slice
    masked: bool


class Plan(NamedTuple):
    """What is computed.

    Attributes:
        table: (blocks and runs, 5) int64 on the host: the rows of `plan_of`.
        blocks: blocks, one tile after the other.
        blind, unseen: (queries,) and (keys,) bool, the rows that see nothing and those that nothing sees; None if there
            are none, or no blocks.
        runs: calls of the fused kernel.
        all_rows: whether runs have every query of the mask.
        one_run: whether a single run has all queries and all keys.
    """

    table: Tensor
    blocks: list[Block]
    blind: Tensor | None
    unseen: Tensor | None
    runs: list[fused.Run]
    all_rows: bool
    one_run: bool


def check_device(q: Tensor) -> None:
    """Accept any device and dtype."""


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """The plan as a table, made once; no table where the mask can't be read now, as under torch.compile."""
    if not on_host(mask.key_start):
        return NO_TABLES
    plan = read_plan(q, k, mask, options, NO_TABLES)
    return NO_TABLES._replace(blocks=plan.table, plan=plan)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables = NO_TABLES
) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D_v) in q's dtype, lse (H, T_q) in float32 or float64; computed in that wider dtype."""
    plan, dtype, head_dim_v = tiles.plan or read_plan(q, k, mask, options, tiles), q.dtype, v.shape[2]
    q, k, v = _widened(q, options), _widened(k, options), _widened(v, options)
    if plan.one_run:
        out, lse = fused.forward(plan.runs[0], q, k, v, options)
    else:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2])
        if not plan.all_rows:
            out.zero_()
            lse.fill_(-math.inf)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if plan.blocks:
            _forward_blocks(plan, q, k, v, mask, options, out, lse.T)
        for run in plan.runs:
            out[run.rows], lse[run.rows] = fused.forward(run, q, k, v, options)
    return out[..., :head_dim_v].to(dtype), lse.T


def _forward_blocks(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockDiagonalMask,
    options: AttentionOptions,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the rows of the blocks in out and lse, which are zeros and -inf before."""
    qs, ks, vs = _heads_first(q, k, v, plan)
    outs = _split_heads(out, ks)
    m_i = qs.new_full((*qs.shape[:3], 1), -math.inf)  # the largest score so far, [n, g, t, 1]
    l_i = torch.zeros_like(m_i)
    if options.sinks is not None and not mask.is_tree:  # a sink is the first key of every row
        m_i.copy_(_sinks(options.sinks, qs).expand_as(m_i))
        l_i.fill_(1.0)
    scratch = qs.new_empty(qs.shape[0] * qs.shape[1] * BLOCK_ROWS * BLOCK_KEYS)  # see `_times_into`
    for block in plan.blocks:
        rows = block.rows
        m_old = m_i[:, :, rows]
        scores, _ = _scores(qs, ks, mask, block, options, scratch)  # [n, g, m, k]
        m_new = torch.maximum(m_old, scores.amax(-1, keepdim=True))
        # The maximum of a row without a key so far is -inf. With 0 in its place its exponentials are all exp(-inf) = 0.
        pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
        p = _exp_(scores.sub_(pivot))
        alpha = _exp_(m_old - pivot)
        l_i[:, :, rows].mul_(alpha).add_(p.sum(-1, keepdim=True))
        outs[:, :, rows].mul_(alpha).add_(_times(_drop(p, block, options), vs[:, block.keys]))
        m_old.copy_(m_new)
    if options.sinks is not None and not mask.is_tree:
        l_i.masked_fill_((mask.key_start == mask.key_stop)[:, None], 0.0)
    elif options.sinks is not None:  # in a tree, whose bounds don't tell the rows that see a key, it is the last key
        m_old, m_i = m_i, torch.maximum(m_i, _sinks(options.sinks, qs))
        alpha = _exp_(m_old - m_i)
        l_i.mul_(alpha).add_(_exp_(_sinks(options.sinks, qs) - m_i)).masked_fill_(m_old == -math.inf, 0.0)
        outs *= alpha
    outs /= l_i.masked_fill(l_i == 0.0, 1.0)
    torch.add(m_i, l_i.log(), out=lse.unflatten(0, qs.shape[:2]).unsqueeze(-1))  # -inf in rows that see nothing


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
    """(dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v, sinks (docs/math.md, section 3)."""
    plan = tiles.plan or read_plan(q, k, mask, options, tiles)
    dtype, head_dim, head_dim_v = q.dtype, q.shape[2], v.shape[2]
    dout, q, k, v, out = (_widened(x, options) for x in (dout, q, k, v, out))
    if not plan.one_run:
        dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))
    if plan.one_run:
        dq, dk, dv = fused.backward(plan.runs[0], dout, dlse, q, k, v, out, lse, options)
    else:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if not plan.all_rows:
            dq.zero_()
        if plan.blocks:
            _backward_blocks(plan, dout, dlse, q, k, v, out, lse, mask, options, dq, dk, dv)
        for run in plan.runs:
            dq[run.rows], dk_of_run, dv_of_run = fused.backward(run, dout, dlse, q, k, v, out, lse, options)
            dk[run.keys] += dk_of_run
            dv[run.keys] += dv_of_run
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
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write the gradients of the blocks in dq, dk and dv, which are zeros before."""
    qs, ks, vs = _heads_first(q, k, v, plan)
    douts = _zero_rows(_split_heads(dout, ks), plan.blind)
    delta = (_split_heads(out, ks) * douts).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= _zero_rows(dlse.unflatten(0, qs.shape[:2]).unsqueeze(-1), plan.blind)
    # Rows that see nothing have +inf, so that their probabilities are 0.
    lse = lse.unflatten(0, qs.shape[:2]).unsqueeze(-1)  # [n, g, t, 1]
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    dqs, dks, dvs = _split_heads(dq, ks), dk.transpose(0, 1), dv.transpose(0, 1)
    scratch = qs.new_empty(qs.shape[0] * qs.shape[1] * BLOCK_ROWS * BLOCK_KEYS)
    scratch_dp = torch.empty_like(scratch)
    for block in plan.blocks:
        rows, keys = block.rows, block.keys
        scores, slope = _scores(qs, ks, mask, block, options, scratch)
        p = _exp_(scores.sub_(lse[:, :, rows]))  # [n, g, m, k]
        dp = _drop(_times_into(scratch_dp, douts[:, :, rows], vs[:, keys].mT), block, options)
        ds = dp.sub_(delta[:, :, rows]).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        dvs[:, keys] += _transposed_times(_drop(p, block, options), douts[:, :, rows])
        dks[:, keys] += _transposed_times(ds, qs[:, :, rows])
        dqs[:, :, rows] += _times(ds, ks[:, keys])
    dq *= options.scale
    dk *= options.scale


def read_plan(q: Tensor, k: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables) -> Plan:
    """The plan of a call, from the table in `tiles` or made now; once per mask. Waits for the mask's device."""
    fuse, pack_invariant = fused.serves(q, k, options), options.pack_invariant

    def read() -> Plan:
        table = tiles.blocks
        if table is None:
            rows = plan_of(mask, fuse=fuse, pack_invariant=pack_invariant)
            table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)
        blocks, runs, gap, end = [], [], False, 0
        for row, row_end, key, key_end, kind in table.tolist():
            if kind < FULL:
                runs.append(fused.Run(row, row_end, key, key_end, kind))
                gap, end = gap or row != end, row_end  # rows of runs ascend
            else:
                blocks.append(Block(slice(row, row_end), slice(key, key_end), kind == MASKED))
        all_rows = not blocks and not gap and end == mask.num_queries
        one_run = all_rows and len(runs) == 1 and (runs[0].key, runs[0].key_end) == (0, mask.num_keys)
        blind, unseen = map(_blind_rows, (mask, mask.transpose())) if blocks else (None, None)
        return Plan(table, blocks, blind, unseen, runs, all_rows, one_run)

    return mask.cached(("plan", fuse, pack_invariant), read)


def plan_of(mask: BlockDiagonalMask, *, fuse: bool, pack_invariant: bool) -> list[tuple[int, int, int, int, int]]:
    """The plan of a mask: row, row_end, key, key_end and kind of each block and each run.

    Args:
        fuse: whether the fused kernel computes the documents that it can.
        pack_invariant: whether no tile may hold two documents.
    """
    found = fused.documents_of(mask)
    if not fuse or mask.is_tree:
        found[:, 4] = fused.OTHER
    documents = found.tolist()
    tiles = torch.tensor(_tiles(documents, pack_invariant), dtype=torch.int64, device=mask.device).view(-1, 2)
    plan = _cut_tree(mask, tiles) if mask.is_tree else _cut_tiles(mask, tiles)
    for document in documents:
        if document[4] != fused.OTHER:
            plan += fused.pieces(fused.Run(*document))
    return plan


def _cut_tiles(mask: BlockDiagonalMask, tiles: Tensor) -> list[tuple[int, int, int, int, int]]:
    """The blocks of tiles [first, end), (tiles, 2), in a mask without trees."""
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
    """The blocks of tiles in a mask of trees: neighbouring pieces of `PIECE` keys that are seen alike, joined."""
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


def _tiles(documents: list[list[int]], pack_invariant: bool) -> list[tuple[int, int]]:
    """Rows [first, end) of each tile, for the documents that the fused kernel doesn't compute.

    Documents share a tile while they fit, unless results must be `pack_invariant`. A longer document begins a tile, and
    so does one after a document of the fused kernel. Rows that see nothing, before and after the documents of a tile,
    are left out.
    """
    tiles, first, last_end = [], 0, 0  # the open tile has the documents that lie in rows [first, last_end)
    for begin, end, _, _, kind in documents:
        if first == last_end or kind != fused.OTHER or pack_invariant or end - first > BLOCK_ROWS:
            tiles.append((first, last_end))
            first = last_end = begin
        if kind != fused.OTHER:
            continue
        while end - first > BLOCK_ROWS:
            tiles.append((first, first + BLOCK_ROWS))
            first += BLOCK_ROWS
        last_end = end
    tiles.append((first, last_end))
    return [(first, end) for first, end in tiles if first < end]


def _blind_rows(mask: BlockDiagonalMask) -> Tensor | None:
    """(num_queries,) bool, True in rows that see nothing; None if there are none."""
    blind = mask.key_start == mask.key_stop
    return blind if bool(blind.any()) else None


def _scores(
    qs: Tensor, ks: Tensor, mask: BlockDiagonalMask, block: Block, options: AttentionOptions, scratch: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scores of a block, [n, g, m, k], -inf where a key is hidden, and their slope by the scaled product (None: 1)."""
    scores = _times_into(scratch, qs[:, :, block.rows], ks[:, block.keys].mT, options.scale)
    keys = torch.arange(block.keys.start, block.keys.stop, device=qs.device)
    slope = None
    if options.softcap:
        capped = scores.div_(options.softcap).tanh_()
        slope = 1 - capped * capped
        scores = capped.mul_(options.softcap)
    if options.alibi_slopes is not None:
        assert mask.diagonal is not None
        places = keys if mask.places is None else mask.places[block.keys]
        distance = (mask.diagonal[block.rows, None] - places).abs()  # [m, k]
        slopes = options.alibi_slopes.expand(qs.shape[2], -1)[block.rows].T.unflatten(0, qs.shape[:2])  # [n, g, m]
        scores -= slopes[..., None] * distance
    if block.masked:  # a minimum costs far less than filling through a mask
        seen = (keys >= mask.key_start[block.rows, None]) & (keys < mask.key_stop[block.rows, None])
        if mask.query_start is not None and mask.query_stop is not None:
            rows = torch.arange(block.rows.start, block.rows.stop, device=qs.device)[:, None]
            seen &= (rows >= mask.query_start[block.keys]) & (rows < mask.query_stop[block.keys])
        torch.minimum(scores, torch.where(seen, math.inf, -math.inf), out=scores)
    return scores, slope


def _drop(x: Tensor, block: Block, options: AttentionOptions) -> Tensor:
    """Apply dropout in place: x [n, g, m, k] times 0 or 1 / (1 - p)."""
    if not options.dropout_p:
        return x
    assert options.dropout_seed is not None
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1, 1)
    queries = torch.arange(block.rows.start, block.rows.stop, device=x.device)[:, None]
    keys = torch.arange(block.keys.start, block.keys.stop, device=x.device)
    keep = keep_mask(options.dropout_seed, heads, queries, keys, options.dropout_p)
    return x.masked_fill_(~keep, 0.0).div_(1 - options.dropout_p)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, g, t, d], k and v [n, t, d], with zeros in rows that see nothing or that nothing sees, because 0 * NaN is
    NaN."""
    ks, vs = k.transpose(0, 1), v.transpose(0, 1)
    return _zero_rows(_split_heads(q, ks), plan.blind), _zero_rows(ks, plan.unseen), _zero_rows(vs, plan.unseen)


def _sinks(sinks: Tensor, qs: Tensor) -> Tensor:
    return sinks.to(qs.dtype).view(*qs.shape[:2], 1, 1)


def _split_heads(x: Tensor, ks: Tensor) -> Tensor:
    """(T, H, D) as [n, g, t, d], given keys [n, t, d]; a view."""
    return x.unflatten(1, (ks.shape[0], -1)).permute(1, 2, 0, 3)


def _widened(x: Tensor, options: AttentionOptions) -> Tensor:
    """(T, H, D) in float32, or float64 if it is float64.

    With `pack_invariant` D grows by zeros and may be copied, so that each row begins at a multiple of 16 bytes: from
    other addresses the matrix library may sum in another order.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not options.pack_invariant:
        return x
    x = pad(x, (0, -x.shape[2] % (16 // x.element_size()))).contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _zero_rows(x: Tensor, blind: Tensor | None) -> Tensor:
    return x if blind is None else x.masked_fill(blind[:, None], 0.0)


def _exp_(x: Tensor) -> Tensor:
    """exp in place, by exp2: on CPUs torch's exp takes up to a hundred times as long where results vanish."""
    return x.mul_(LOG2E).exp2_()


def _times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a] @ [n, a, b] -> [n, g, m, b]: the query heads of a group are rows of one product."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])


def _times_into(scratch: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """`_times` and a factor, in a part of `scratch`, which has room for a block's scores. Allocating it for every block
    would take a tenth of the time, mostly page faults."""
    rows = x.flatten(1, 2)
    shape = (*rows.shape[:2], y.shape[2])
    out = scratch[: math.prod(shape)].view(shape)
    return torch.baddbmm(out, rows, y, beta=0, alpha=scale, out=out).unflatten(1, x.shape[1:3])


def _transposed_times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a], [n, g, m, b] -> [n, a, b], summed over the rows and heads of the group."""
    return x.flatten(1, 2).mT @ y.flatten(1, 2)

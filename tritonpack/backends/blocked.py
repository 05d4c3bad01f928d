"""Attention in plain torch that walks the mask block by block: O(T) memory, work only where something is visible.

The default where there is no GPU, and the kernels' algorithm in a form that is easier to read: a tile is up to
`BLOCK_ROWS` consecutive query rows, its blocks are up to `BLOCK_KEYS` keys each, between the first and the last that
any of the rows sees. The mask is read on the host, so on an accelerator this backend waits.

Shapes: t tokens, h heads, d head dimension; n key heads, g query heads per key head; m rows of a tile, k keys of a
    block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritonpack.backends.dropout import keep_mask
from tritonpack.backends.tile_table import NO_TABLES, TileTables
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

BLOCK_ROWS = 128
BLOCK_KEYS = 512  # a block's scores of eight heads are then 2 MiB, what caches hold

LOG2E = 1 / math.log(2)


@dataclass(frozen=True)
class Block:
    """Keys [key, key_end) beside the rows of a tile.

    Attributes:
        ceiling: (m, k) float32, infinity where a row sees a key and -infinity where it doesn't; None if all see all.
    """

    key: int
    key_end: int
    ceiling: Tensor | None

    @property
    def keys(self) -> slice:
        return slice(self.key, self.key_end)


@dataclass(frozen=True)
class Tile:
    """Query rows [row, row_end) and all keys that they see, in blocks."""

    row: int
    row_end: int
    blocks: tuple[Block, ...]

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row_end)


@dataclass(frozen=True)
class Plan:
    """The tiles of a mask, and its blind rows: None, or a bool tensor that is True where nothing is seen or sees.

    `pairs` are those of the largest block.
    """

    tiles: tuple[Tile, ...]
    pairs: int
    blind_queries: Tensor | None
    blind_keys: Tensor | None


# By the mask's key_start, which lives as long as the mask; with the rest of what the plan is made of.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def check_device(q: Tensor) -> None:
    """Any device and dtype will do."""


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """Nothing on the device: the blocks are planned on the host, when they are computed (`_plan`)."""
    return NO_TABLES


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables = NO_TABLES
) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D_v) in q's dtype, lse (H, T_q) in float32 or float64; computed in that wider dtype."""
    plan = _plan(mask, options.pack_invariant)
    qs, ks, vs = _heads_first(q, k, v, plan)
    out = qs.new_zeros(*qs.shape[:3], v.shape[2])
    m_all = qs.new_full((*qs.shape[:3], 1), -math.inf)  # of the scores so far, [n, g, t, 1]
    l_all = torch.zeros_like(m_all)
    if options.sinks is not None:  # a key that every row has seen before the first
        m_all.copy_(_sinks(options.sinks, qs).expand_as(m_all))
        l_all.fill_(1.0)
    scratch = _scratch(qs, plan)
    for tile in plan.tiles:
        acc, m_i, l_i = out[:, :, tile.rows], m_all[:, :, tile.rows], l_all[:, :, tile.rows]
        for block in tile.blocks:
            scores, _ = _scores(qs, ks, mask, tile, block, options, scratch)  # [n, g, m, k]
            m_new = torch.maximum(m_i, scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet has no maximum; 0 in its place leaves every exponential at exp(-inf) = 0.
            pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
            p = _exp_(scores.sub_(pivot))
            alpha = _exp_(m_i - pivot)
            l_i.mul_(alpha).add_(p.sum(-1, keepdim=True))
            acc.mul_(alpha).add_(_times(_drop(p, tile, block, options), vs[:, block.keys]))
            m_i.copy_(m_new)
    if options.sinks is not None:
        nothing = mask.key_start == mask.key_stop
        l_all.masked_fill_(nothing[:, None], 0.0)
    out /= l_all.masked_fill(l_all == 0.0, 1.0)
    lse = m_all + l_all.log()  # -inf where a row saw nothing
    return _tokens_first(out, q), lse.squeeze(-1).flatten(0, 1)


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
    plan = _plan(mask, options.pack_invariant)
    qs, ks, vs = _heads_first(q, k, v, plan)
    douts = _zero_rows(_split_heads(dout, ks), plan.blind_queries)
    delta = (_split_heads(out, ks) * douts).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= _zero_rows(dlse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1), plan.blind_queries)
    # Rows that see nothing have +inf, so that their probabilities are 0.
    lse = lse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1)  # [n, g, t, 1]
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    scratch, scratch_dp = _scratch(qs, plan), _scratch(qs, plan)
    for tile in plan.tiles:
        rows = tile.rows
        for block in tile.blocks:
            scores, slope = _scores(qs, ks, mask, tile, block, options, scratch)
            p = _exp_(scores.sub_(lse[:, :, rows]))  # [n, g, m, k]
            dp = _drop(_times_into(scratch_dp, douts[:, :, rows], vs[:, block.keys].mT), tile, block, options)
            ds = dp.sub_(delta[:, :, rows]).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dv[:, block.keys] += _transposed_times(_drop(p, tile, block, options), douts[:, :, rows])
            dk[:, block.keys] += _transposed_times(ds, qs[:, :, rows])
            dq[:, :, rows] += _times(ds, ks[:, block.keys])
    dq *= options.scale
    dk *= options.scale
    dsinks = None
    if options.sinks is not None:
        share = torch.exp(_sinks(options.sinks, qs) - lse)
        dsinks = -(share * delta).sum((2, 3)).flatten().to(options.sinks.dtype)
    return _tokens_first(dq, q), dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype), dsinks


def _plan(mask: BlockDiagonalMask, pack_invariant: bool = False) -> Plan:
    """The tiles that cover every row that sees something; waits for the mask's device, once per mask.

    Tiles begin where a row shares no key with the row above (a document begins), so that long documents fill their
    tiles; short documents share one while they fit, unless results must not depend on the pack.
    """
    key = (mask.key_stop, pack_invariant, _version(mask.key_start), _version(mask.key_stop))
    known, plan = _plans.get(mask.key_start, (None, None))
    if known is not None and known[0] is key[0] and known[1:] == key[1:]:
        return plan
    start, stop = mask.key_start.tolist(), mask.key_stop.tolist()
    tiles = []
    for row, row_end in _row_blocks(start, stop, pack_invariant):
        while row < row_end and start[row] == stop[row]:
            row += 1
        while row < row_end and start[row_end - 1] == stop[row_end - 1]:
            row_end -= 1
        if row < row_end:
            blocks = _key_blocks(mask, row, row_end, start[row], stop[row_end - 1], start[row_end - 1], stop[row])
            tiles.append(Tile(row, row_end, tuple(blocks)))
    pairs = max(((t.row_end - t.row) * (b.key_end - b.key) for t in tiles for b in t.blocks), default=0)
    plan = Plan(tuple(tiles), pairs, _blind_rows(mask), _blind_rows(mask.transpose()))
    _plans[mask.key_start] = key, plan
    return plan


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _row_blocks(start: list[int], stop: list[int], pack_invariant: bool) -> list[tuple[int, int]]:
    if not start:
        return []
    begins = [row for row in range(len(start)) if row == 0 or start[row] >= stop[row - 1]]
    blocks, first = [], 0
    for begin, end in zip(begins, [*begins[1:], len(start)], strict=True):
        if end - first <= BLOCK_ROWS and not pack_invariant:
            continue  # the document still fits with those before it
        if first < begin:
            blocks.append((first, begin))
        first = begin
        while end - first > BLOCK_ROWS:
            blocks.append((first, first + BLOCK_ROWS))
            first += BLOCK_ROWS
    if first < len(start):
        blocks.append((first, len(start)))
    return blocks


def _key_blocks(
    mask: BlockDiagonalMask, row: int, row_end: int, first: int, end: int, common: int, common_end: int
) -> Iterator[Block]:
    """Keys [first, end) beside rows [row, row_end), all of which see the keys [common, common_end)."""
    start, stop = mask.key_start[row:row_end, None], mask.key_stop[row:row_end, None]
    for key in range(first, end, BLOCK_KEYS):
        key_end = min(key + BLOCK_KEYS, end)
        ceiling = None
        if not common <= key < key_end <= common_end:
            keys = torch.arange(key, key_end, device=mask.device)
            ceiling = torch.where((keys >= start) & (keys < stop), math.inf, -math.inf)
        yield Block(key, key_end, ceiling)


def _blind_rows(mask: BlockDiagonalMask) -> Tensor | None:
    blind = mask.key_start == mask.key_stop
    return blind if bool(blind.any()) else None


def _scores(
    qs: Tensor,
    ks: Tensor,
    mask: BlockDiagonalMask,
    tile: Tile,
    block: Block,
    options: AttentionOptions,
    scratch: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Scores of a block, [n, g, m, k], -inf where a key is hidden, and their slope by the scaled product (None: 1)."""
    scores = _times_into(scratch, qs[:, :, tile.rows], ks[:, block.keys].mT, options.scale)
    slope = None
    if options.softcap:
        capped = scores.div_(options.softcap).tanh_()
        slope = 1 - capped * capped
        scores = capped.mul_(options.softcap)
    if options.alibi_slopes is not None:
        assert mask.diagonal is not None
        keys = torch.arange(block.key, block.key_end, device=qs.device)
        distance = (mask.diagonal[tile.rows, None] - keys).abs()  # [m, k]
        slopes = options.alibi_slopes.expand(qs.shape[2], -1)[tile.rows].T.unflatten(0, qs.shape[:2])  # [n, g, m]
        scores -= slopes[..., None] * distance
    if block.ceiling is not None:  # far cheaper than filling through a mask
        torch.minimum(scores, block.ceiling, out=scores)
    return scores, slope


def _drop(x: Tensor, tile: Tile, block: Block, options: AttentionOptions) -> Tensor:
    """x [n, g, m, k] times 0 or 1 / (1 - p), in place: dropout, as forward and backward apply it alike."""
    if not options.dropout_p:
        return x
    assert options.dropout_seed is not None
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1, 1)
    queries = torch.arange(tile.row, tile.row_end, device=x.device)[:, None]
    keys = torch.arange(block.key, block.key_end, device=x.device)
    keep = keep_mask(options.dropout_seed, heads, queries, keys, options.dropout_p)
    return x.masked_fill_(~keep, 0.0).div_(1 - options.dropout_p)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, g, t, d], k and v [n, t, d], in the wider dtype, with zeros in the plan's blind rows (0 * NaN is NaN)."""
    qs = _zero_rows(_split_heads(q, k.transpose(0, 1)), plan.blind_queries)
    ks, vs = (_zero_rows(x.transpose(0, 1).to(qs.dtype), plan.blind_keys) for x in (k, v))
    return qs, ks, vs


def _split_heads(x: Tensor, ks: Tensor) -> Tensor:
    """(T, H, D) as [n, g, t, d] in the wider dtype, given keys [n, t, d]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(1, (ks.shape[0], -1)).permute(1, 2, 0, 3).to(wide)


def _sinks(sinks: Tensor, qs: Tensor) -> Tensor:
    return sinks.to(qs.dtype).view(*qs.shape[:2], 1, 1)


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1).to(like.dtype)


def _zero_rows(x: Tensor, blind: Tensor | None) -> Tensor:
    return x if blind is None else x.masked_fill(blind[:, None], 0.0)


def _exp_(x: Tensor) -> Tensor:
    """exp in place, by exp2: on CPUs torch's exp takes up to a hundred times as long where results vanish."""
    return x.mul_(LOG2E).exp2_()


def _scratch(qs: Tensor, plan: Plan) -> Tensor:
    """Room for a block's scores; taking it anew for every block costs a tenth of the time, most of it page faults."""
    return qs.new_empty(qs.shape[0] * qs.shape[1] * plan.pairs)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a] @ [n, a, b] -> [n, g, m, b]: the query heads of a group are rows of one product."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])


def _times_into(scratch: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """`_times` and a factor, in a part of `scratch`."""
    rows = x.flatten(1, 2)
    shape = (*rows.shape[:2], y.shape[2])
    out = scratch[: math.prod(shape)].view(shape)
    return torch.baddbmm(out, rows, y, beta=0, alpha=scale, out=out).unflatten(1, x.shape[1:3])


def _transposed_times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a], [n, g, m, b] -> [n, a, b], summed over the rows and heads of the group."""
    return x.flatten(1, 2).mT @ y.flatten(1, 2)

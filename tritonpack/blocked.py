"""Attention in plain torch that walks the mask block by block: O(T) memory, work only where something is visible.

The default where there is no GPU. A tile is up to `BLOCK_ROWS` consecutive query rows together with all keys between
the first and the last that any of them sees. The mask is read on the host, so on an accelerator this backend waits.

Shapes: t tokens, h heads, d head dimension; n key heads, g query heads per key head; m rows of a tile, k keys of a
    tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritonpack.dropout import keep_mask
from tritonpack.mask import BlockDiagonalMask
from tritonpack.options import AttentionOptions

BLOCK_ROWS = 128


@dataclass(frozen=True)
class Tile:
    """Query rows [row, row_end) and the keys [key, key_end) that they see; all of them see [full, full_end)."""

    row: int
    row_end: int
    key: int
    key_end: int
    full: int
    full_end: int


@dataclass(frozen=True)
class Plan:
    """The tiles of a mask, and its blind rows: None, or a bool tensor that is True where nothing is seen or sees."""

    tiles: tuple[Tile, ...]
    blind_queries: Tensor | None
    blind_keys: Tensor | None


# By the mask's key_start, which lives as long as the mask; with the rest of what the plan is made of.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D_v) in q's dtype, lse (H, T_q) in float32 or float64; computed in that wider dtype."""
    plan = plan_tiles(mask, options.pack_invariant)
    qs, ks, vs = _heads_first(q, k, v, plan)
    out = qs.new_zeros(*qs.shape[:3], v.shape[2])
    lse = qs.new_full(qs.shape[:3], float("-inf"))
    sinks = None if options.sinks is None else options.sinks.to(qs.dtype).view(*qs.shape[:2], 1, 1)
    for tile in plan.tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        scores, _ = _scores(qs, ks, mask, tile, options)  # [n, g, m, k]
        top = scores.amax(-1, keepdim=True)
        sees = top > float("-inf")
        top = top if sinks is None else torch.maximum(top, sinks)
        top = torch.where(sees, top, 0.0)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.where(sees, torch.exp(sinks - top), 0.0)
        lse[:, :, rows] = (top + total.log()).squeeze(-1)
        _drop(p, tile, options)
        out[:, :, rows] = _times(p, vs[:, keys]) / total.masked_fill_(total == 0.0, 1.0)
    return _tokens_first(out, q), lse.flatten(0, 1)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v, sinks (docs/math.md, section 3)."""
    plan = plan_tiles(mask, options.pack_invariant)
    qs, ks, vs = _heads_first(q, k, v, plan)
    douts = _zero_rows(_split_heads(dout, ks), plan.blind_queries)
    outs = _split_heads(out, ks)
    lse = lse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1)  # [n, g, t, 1]
    empty = lse == float("-inf")
    lse = lse.masked_fill(empty, 0.0)
    delta = (outs * douts).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= _zero_rows(dlse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1), plan.blind_queries)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    for tile in plan.tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        scores, slope = _scores(qs, ks, mask, tile, options)
        p = scores.sub_(lse[:, :, rows]).exp_()  # [n, g, m, k]
        dp = _drop(_times(douts[:, :, rows], vs[:, keys].mT), tile, options)
        ds = dp.sub_(delta[:, :, rows]).mul_(p).mul_(options.scale)
        if slope is not None:
            ds.mul_(slope)
        dv[:, keys] += _transposed_times(_drop(p, tile, options), douts[:, :, rows])
        dq[:, :, rows] = _times(ds, ks[:, keys])
        dk[:, keys] += _transposed_times(ds, qs[:, :, rows])
    dsinks = None
    if options.sinks is not None:
        share = torch.exp(options.sinks.to(qs.dtype).view(*qs.shape[:2], 1, 1) - lse).masked_fill(empty, 0.0)
        dsinks = -(share * delta).sum((2, 3)).flatten().to(options.sinks.dtype)
    return _tokens_first(dq, q), dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype), dsinks


def plan_tiles(mask: BlockDiagonalMask, pack_invariant: bool = False) -> Plan:
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
            full, full_end = start[row_end - 1], stop[row]
            if full_end <= full:
                full = full_end = start[row]
            tiles.append(Tile(row, row_end, start[row], stop[row_end - 1], full, full_end))
    plan = Plan(tuple(tiles), _blind_rows(mask), _blind_rows(mask.transpose()))
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


def _blind_rows(mask: BlockDiagonalMask) -> Tensor | None:
    blind = mask.key_start == mask.key_stop
    return blind if bool(blind.any()) else None


def _scores(
    qs: Tensor, ks: Tensor, mask: BlockDiagonalMask, tile: Tile, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """Scores of a tile, [n, g, m, k], -inf where a key is hidden, and their slope by the scaled product (None: 1)."""
    rows = slice(tile.row, tile.row_end)
    scores = _times(qs[:, :, rows], ks[:, tile.key : tile.key_end].mT).mul_(options.scale)
    slope = None
    if options.softcap:
        capped = scores.div_(options.softcap).tanh_()
        slope = 1 - capped * capped
        scores = capped.mul_(options.softcap)
    if options.alibi_slopes is not None:
        assert mask.diagonal is not None
        distance = (mask.diagonal[rows, None] - torch.arange(tile.key, tile.key_end, device=qs.device)).abs()  # [m, k]
        slopes = options.alibi_slopes.expand(qs.shape[2], -1)[rows].T.unflatten(0, qs.shape[:2])  # [n, g, m]
        scores -= slopes[..., None] * distance
    start, stop = mask.key_start[rows, None], mask.key_stop[rows, None]
    for key, key_end in ((tile.key, tile.full), (tile.full_end, tile.key_end)):
        if key < key_end:
            keys = torch.arange(key, key_end, device=scores.device)
            hidden = (keys < start) | (keys >= stop)  # [m, k]
            scores[..., key - tile.key : key_end - tile.key].masked_fill_(hidden, float("-inf"))
    return scores, slope


def _drop(x: Tensor, tile: Tile, options: AttentionOptions) -> Tensor:
    """x [n, g, m, k] times 0 or 1 / (1 - p), in place: dropout, as forward and backward apply it alike."""
    if not options.dropout_p:
        return x
    assert options.dropout_seed is not None
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1, 1)
    queries = torch.arange(tile.row, tile.row_end, device=x.device)[:, None]
    keys = torch.arange(tile.key, tile.key_end, device=x.device)
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


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1).to(like.dtype)


def _zero_rows(x: Tensor, blind: Tensor | None) -> Tensor:
    return x if blind is None else x.masked_fill(blind[:, None], 0.0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a] @ [n, a, b] -> [n, g, m, b]: the query heads of a group are rows of one product."""
    return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])


def _transposed_times(x: Tensor, y: Tensor) -> Tensor:
    """[n, g, m, a], [n, g, m, b] -> [n, a, b], summed over the rows and heads of the group."""
    return x.flatten(1, 2).mT @ y.flatten(1, 2)

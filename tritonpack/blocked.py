"""Attention in plain torch that walks the mask block by block: O(T) memory, work only where something is visible.

The default where there is no GPU. A tile is up to `BLOCK_ROWS` consecutive query rows together with all keys between
the first and the last that any of them sees. The mask is read on the host, so on an accelerator this backend waits.

Shapes: t tokens, h heads, d head dimension; n key heads, g query heads per key head; m rows of a tile, k keys of a
    tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tritonpack.mask import BlockDiagonalMask

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


_plans: WeakKeyDictionary[BlockDiagonalMask, Plan] = WeakKeyDictionary()


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D) in q's dtype, lse (H, T_q) in float32 or float64; computed in that wider dtype."""
    plan = plan_tiles(mask)
    qs, ks, vs = _heads_first(q, k, v, plan)
    out = torch.zeros_like(qs)
    lse = qs.new_full(qs.shape[:3], float("-inf"))
    for tile in plan.tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        scores = _scores(qs, ks, mask, tile, scale)  # [n, g, m, k]
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == float("-inf"), 0.0)  # rows that see nothing
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, rows] = (top + total.log()).squeeze(-1)
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
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtype of q, k, v (docs/math.md, section 3)."""
    plan = plan_tiles(mask)
    qs, ks, vs = _heads_first(q, k, v, plan)
    douts = _zero_rows(_split_heads(dout, ks), plan.blind_queries)
    outs = _split_heads(out, ks)
    lse = lse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1)  # [n, g, t, 1]
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    delta = (outs * douts).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= _zero_rows(dlse.to(qs.dtype).unflatten(0, qs.shape[:2]).unsqueeze(-1), plan.blind_queries)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    for tile in plan.tiles:
        rows, keys = slice(tile.row, tile.row_end), slice(tile.key, tile.key_end)
        p = _scores(qs, ks, mask, tile, scale).sub_(lse[:, :, rows]).exp_()  # [n, g, m, k]
        dv[:, keys] += _transposed_times(p, douts[:, :, rows])
        ds = _times(douts[:, :, rows], vs[:, keys].mT).sub_(delta[:, :, rows]).mul_(p).mul_(scale)
        dq[:, :, rows] = _times(ds, ks[:, keys])
        dk[:, keys] += _transposed_times(ds, qs[:, :, rows])
    return _tokens_first(dq, q), dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype)


def plan_tiles(mask: BlockDiagonalMask) -> Plan:
    """The tiles that cover every row that sees something; waits for the mask's device, once per mask.

    Tiles begin where a row shares no key with the row above (a document begins), so that long documents fill their
    tiles; short documents share one while they fit.
    """
    if mask in _plans:
        return _plans[mask]
    start, stop = mask.key_start.tolist(), mask.key_stop.tolist()
    tiles = []
    for row, row_end in _row_blocks(start, stop):
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
    _plans[mask] = plan
    return plan


def _row_blocks(start: list[int], stop: list[int]) -> list[tuple[int, int]]:
    if not start:
        return []
    begins = [row for row in range(len(start)) if row == 0 or start[row] >= stop[row - 1]]
    blocks, first = [], 0
    for begin, end in zip(begins, [*begins[1:], len(start)], strict=True):
        if end - first <= BLOCK_ROWS:
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


def _scores(qs: Tensor, ks: Tensor, mask: BlockDiagonalMask, tile: Tile, scale: float) -> Tensor:
    """Scaled scores of a tile, [n, g, m, k], -inf where the mask hides a key."""
    scores = _times(qs[:, :, tile.row : tile.row_end], ks[:, tile.key : tile.key_end].mT).mul_(scale)
    start = mask.key_start[tile.row : tile.row_end, None]
    stop = mask.key_stop[tile.row : tile.row_end, None]
    for key, key_end in ((tile.key, tile.full), (tile.full_end, tile.key_end)):
        if key < key_end:
            keys = torch.arange(key, key_end, device=scores.device)
            hidden = (keys < start) | (keys >= stop)  # [m, k]
            scores[..., key - tile.key : key_end - tile.key].masked_fill_(hidden, float("-inf"))
    return scores


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

"""The keys that each row sees, from offsets, position ids, segment ids or padding: in torch, or by a kernel on GPUs.

Every builder finds the document of each row and the row's diagonal, the key at its own place. `visible_keys` then
applies windows and chunks (docs/math.md, section 1). Documents may also be read from a mask of pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Reach, check_rows, check_sound, describe, on_host, require

WHOLE_DOCUMENT = Reach(UNLIMITED, UNLIMITED, UNLIMITED)

# Addends of a mask of pairs give weights of exactly 0 up to float16's minimum, to which larger ones are clamped.
HIDDEN = torch.finfo(torch.float16).min
PAIRS_REMEDY = (
    "Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask with the number of each token's "
    "document, or unpatch the model to use a mask of your own."
)


class Intervals(NamedTuple):
    """The fields of a `BlockDiagonalMask`, each (T_q,) int32; `document` may be a function that computes it. `seen_by`
    are the bounds of each key, (T_k,) int32, of a mask of trees, or computed by a kernel along with the others."""

    start: Tensor
    stop: Tensor
    diagonal: Tensor
    document: Tensor | Callable[[], Tensor]
    seen_by: tuple[Tensor, Tensor] | None = None
    is_tree: bool = False


def from_offsets(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, reach: Reach) -> Intervals:
    """The intervals of documents given by offsets of queries and of keys."""
    if kernels.serve(cu_q):
        from tritonpack.kernels.intervals import intervals_of_offsets

        return Intervals(*intervals_of_offsets(cu_q, cu_k, total_q, total_k, *reach))
    check_sound(cu_q, total_q, "total_q", "cu_seqlens")
    check_sound(cu_k, total_k, "total_k", "cu_seqlens" if cu_k is cu_q else "cu_seqlens_k")
    rows = torch.arange(total_q, device=cu_q.device)
    # The last document that starts at or before the row. Slack rows get the number after the last document, and with
    # it the empty interval [cu[-1], cu[-1]).
    document = torch.searchsorted(cu_q, rows, right=True) - 1
    following = (document + 1).clamp(max=cu_q.shape[0] - 1)
    begin, end = cu_k[document], cu_k[following]
    document = document.clamp(max=max(cu_q.shape[0] - 2, 0)).to(torch.int32)
    diagonal = rows - cu_q[following] + end
    return Intervals(*visible_keys(diagonal, begin, end, reach), diagonal.to(torch.int32), document)


def from_position_ids(position_ids: Tensor, reach: Reach) -> Intervals:
    """The intervals of position ids, in the shapes of `BlockDiagonalMask.from_position_ids`."""
    if isinstance(position_ids, Tensor) and kernels.serve(position_ids):
        if position_ids.ndim == 3 and position_ids.shape[0] == 4:
            position_ids = position_ids[0]
        if position_ids.ndim < 3:
            return _by_kernel(check_rows(position_ids, "position_ids"), "positions", reach)
    return from_runs(document_starts(position_ids), None, reach)


def from_rows(ids: Tensor, rule: Literal["segments", "padding"], reach: Reach) -> Intervals:
    """The intervals of (B, T) segment ids, 0 for padding, or of a padding mask, in which all tokens have one number.
    Refuse negative ids, and a document in several pieces."""
    if kernels.serve(ids):
        return _by_kernel(ids, rule, reach)
    numbers = ids if rule == "segments" else (ids != 0).to(torch.uint8)
    starts, in_order = changes(numbers), numbers.sort(dim=1).values
    pieces = (starts & (numbers != 0)).sum(1)
    documents = (changes(in_order) & (in_order != 0)).sum(1)
    wrong = (numbers < 0).any(1) | (pieces != documents)

    def message() -> str:
        row = int(wrong.nonzero()[0, 0]) if on_host(ids) else None
        found = "" if row is None else f"; row {row} is {ids[row].tolist()!r:.200}"
        if rule == "padding":
            return f"attention_mask has padding between the tokens of a row{found}; use from_segment_ids for documents."
        must = "segment_ids must not be negative, and the tokens of a document must be contiguous within their row"
        return f"{must} (0 is padding){found}; renumber the pieces, or move the tokens of each document together."

    require(~wrong.any(), message)
    return from_runs(starts, numbers != 0, reach)


def from_runs(starts: Tensor, live: Tensor | None, reach: Reach) -> Intervals:
    """The intervals of (B, T) rows that are cut into runs at `starts`; runs that aren't `live` are padding."""
    live = torch.ones_like(starts) if live is None else live
    if starts.is_cuda and kernels.serve(starts):
        return _by_kernel((starts.to(torch.uint8) + 2 * live).view(1, -1), "codes", reach)
    starts, live = starts.reshape(-1), live.reshape(-1)
    rows = torch.arange(starts.shape[0], device=starts.device)
    begin, end = _runs(starts, rows)
    found = visible_keys(rows, begin, torch.where(live, end, begin), reach)
    return Intervals(*found, rows.to(torch.int32), partial(number_documents, starts & live))


def visible_keys(diagonal: Tensor, begin: Tensor, end: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """The keys [start, stop), int32, that rows see of the keys [begin, end) of their documents: windows and chunks.

    `diagonal`, the key at each row's own place, may lie outside the document. `store_interval` of
    tritonpack/kernels/intervals.py computes the same on GPUs.
    """
    start, stop = diagonal - reach.left, diagonal + reach.right + 1
    if reach.chunk < UNLIMITED:
        chunk_begin = begin + (diagonal - begin) // reach.chunk * reach.chunk
        start, stop = torch.maximum(start, chunk_begin), torch.minimum(stop, chunk_begin + reach.chunk)
    return start.clamp(begin, end).to(torch.int32), stop.clamp(begin, end).to(torch.int32)


def widen_to_spans(seen: Intervals, documents: Intervals, spans: Tensor) -> Intervals:
    """Let tokens that see `seen` also see their whole span within `documents`; `spans` are (T_q,) ids, 0 outside."""
    rows = torch.arange(spans.shape[0], device=spans.device)
    begin, end = _runs(changes(spans[None])[0] | (spans == 0), rows)
    begin = torch.maximum(begin.to(torch.int32), documents.start)
    end = torch.minimum(end.to(torch.int32), documents.stop)
    return seen._replace(start=torch.minimum(seen.start, begin), stop=torch.maximum(seen.stop, end), seen_by=None)


def document_starts(position_ids: Tensor) -> Tensor:
    """(B, T) bool, True where documents begin, from position ids as `BlockDiagonalMask.from_position_ids` takes them.

    In the (3, B, T) form a text token has the same number three times, and the patches of an image ascend. So a
    document begins where the triples don't ascend, and between two text tokens whose step isn't +1.
    """
    multimodal = isinstance(position_ids, Tensor) and position_ids.ndim == 3
    if multimodal and position_ids.shape[0] not in (3, 4):
        raise ValueError(
            f"position_ids of three dimensions must be (3, B, T) or (4, B, T); got {tuple(position_ids.shape)}."
        )
    time = check_rows(position_ids[0] if multimodal else position_ids, "position_ids").long()  # unsigned steps wrap
    begins = time.diff(dim=1) != 1
    if multimodal and position_ids.shape[0] == 3:
        places = position_ids.long()
        text = (places == time).all(0)
        step_t, step_h, step_w = places.diff(dim=2)
        ascends = (step_t > 0) | (step_t == 0) & ((step_h > 0) | (step_h == 0) & (step_w > 0))
        begins = ~ascends | (begins & text[:, 1:] & text[:, :-1])
    return torch.cat([torch.ones_like(time[:, :1], dtype=torch.bool), begins], dim=1)


def documents_of_pairs(mask: Tensor, tokens: torch.Size) -> Tensor:
    """The number of each token's document in its row from 1, and 0 for padding, as (B, T) int32, from a mask of pairs.

    LLaMA-Factory's `neat_packing` passes such masks, (B or 1, 1, T, T): True or 0 where a query sees a key, False or
    -65504 or less where it doesn't. Windows, chunks and images come from the model. All pairs are checked.
    """
    rows, length = tokens
    fits = mask.shape in ((rows, 1, length, length), (1, 1, length, length))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"a mask of pairs must be bool or floating point, of shape {(rows, 1, length, length)}, one for all heads "
            f"and without keys of a cache; got attention_mask {describe(mask)}. Convert integers with mask.bool(). "
            f"{PAIRS_REMEDY}"
        )
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    if mask.dtype != torch.bool:
        message = "attention_mask holds addends other than 0 and the smallest numbers (at most -65504), a bias."
        require((seen | (mask[:, 0] <= HIDDEN)).all(), f"{message} {PAIRS_REMEDY}")
    count = seen.sum(-1)
    numbers = torch.where(count > 0, (count == 1).cumsum(1), 0)  # the first token of a document sees itself alone
    expected = (numbers[:, :, None] == numbers[:, None]).tril_() & (numbers > 0)[:, None]
    wrong = (seen != expected).any(-1)

    def not_causal() -> str:
        where = " (row {}, token {})".format(*wrong.nonzero()[0].tolist()) if wrong.device.type == "cpu" else ""
        return (
            f"attention_mask isn't block-diagonal and causal{where}. From a mask of pairs a patched model reads "
            "documents, in which each token sees exactly itself and the tokens before it, and padding, which sees "
            f"nothing. Windows and images come from the model. {PAIRS_REMEDY}"
        )

    require(~wrong.any(), not_causal)
    return numbers.to(torch.int32).expand(rows, length)


def changes(ids: Tensor) -> Tensor:
    """True at the begin of each (B, T) row and where a value differs from the value before."""
    return torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)


def number_documents(first: Tensor) -> Tensor:
    """The number of each row's document, (T,) int32, from whether a document begins at the row."""
    return (first.cumsum(0, dtype=torch.int32) - 1).clamp(min=0)


def _by_kernel(ids: Tensor, rule: str, reach: Reach) -> Intervals:
    from tritonpack.kernels.intervals import intervals_of_ids

    start, stop, row, begin, seen_by = intervals_of_ids(ids, rule, *reach)
    return Intervals(start, stop, row, lambda: number_documents(begin == row), seen_by)


def _runs(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of each row's run, from one start to the next."""
    total = starts.shape[0]
    if not total:
        return rows, rows
    begin = torch.where(starts, rows, 0).cummax(0).values
    # The next start after each row, by a scan from the right.
    following = torch.where(starts, rows, total).flip(0).cummin(0).values.flip(0)
    return begin, torch.cat([following[1:], following.new_full((1,), total)])

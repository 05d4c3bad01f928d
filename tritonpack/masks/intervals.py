"""The keys that each row sees, from offsets, position ids, segment ids or padding: in torch, or by a kernel on GPUs.

Every builder finds the document of each row and the row's diagonal, the key at its own place. `visible_keys` then
applies windows and chunks, which a `Reach` describes (docs/math.md, section 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Reach, check_rows, check_sound, on_host, require

WHOLE_DOCUMENT = Reach(UNLIMITED, UNLIMITED, UNLIMITED)


class Intervals(NamedTuple):
    """The fields of a `BlockDiagonalMask`, each (T_q,) int32; `document` may be a function that computes it.

    `seen_by` are the bounds of the transpose, (T_k,) int32, where a kernel computed them along with the others.
    """

    start: Tensor
    stop: Tensor
    diagonal: Tensor
    document: Tensor | Callable[[], Tensor]
    seen_by: tuple[Tensor, Tensor] | None = None


def from_offsets(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, reach: Reach) -> Intervals:
    """The intervals of documents given by offsets of queries and of keys.

    Raises:
        ValueError: offsets that decrease, don't begin with 0 or exceed the total.
    """
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

    Raises:
        ValueError: negative ids, or a document in several pieces; on an accelerator an assertion fails.
    """
    if kernels.serve(ids):
        return _by_kernel(ids, rule, reach)
    numbers = ids if rule == "segments" else (ids != 0).to(torch.uint8)
    starts, in_order = changes(numbers), numbers.sort(dim=1).values
    pieces = (starts & (numbers != 0)).sum(1)
    documents = (changes(in_order) & (in_order != 0)).sum(1)
    wrong = (numbers < 0).any(1) | (pieces != documents)

    def message() -> str:
        row = int(wrong.nonzero()[0, 0]) if on_host(ids) else None
        what, remedy = _RULES[rule]
        return what + ("" if row is None else f"; row {row} is {ids[row].tolist()!r:.200}") + remedy

    require(~wrong.any(), message)
    return from_runs(starts, numbers != 0, reach)


_RULES = {
    "segments": (
        "segment_ids must not be negative, and the tokens of a document must be contiguous within their row (0 is "
        "padding)",
        "; renumber the pieces, or move the tokens of each document together.",
    ),
    "padding": (
        "attention_mask has padding between the tokens of a row; padding may lie on the left and on the right only",
        "; for several documents in a row use from_segment_ids.",
    ),
}


def from_runs(starts: Tensor, live: Tensor | None, reach: Reach) -> Intervals:
    """The intervals of (B, T) rows that are cut into runs at `starts`; runs that aren't `live` are padding."""
    live = torch.ones_like(starts) if live is None else live
    if starts.is_cuda and kernels.serve(starts):
        codes = starts.to(torch.uint8) + 2 * live
        return _by_kernel(codes.reshape(1, -1), "codes", reach)
    starts, live = starts.reshape(-1), live.reshape(-1)
    rows = torch.arange(starts.shape[0], device=starts.device)
    begin, end = _runs(starts, rows)
    found = visible_keys(rows, begin, torch.where(live, end, begin), reach)
    return Intervals(*found, rows.to(torch.int32), partial(number_documents, starts & live))


def visible_keys(diagonal: Tensor, begin: Tensor, end: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """The keys [start, stop) that rows see of the keys [begin, end) of their documents, int32: windows and chunks.

    `store_interval` of tritonpack/kernels/intervals.py computes the same on GPUs.

    Args:
        diagonal: the key at each row's own place, int64; may lie outside the document.
        begin, end: int64 in the same shape.
        reach: how far the rows see.
    """
    start, stop = diagonal - reach.left, diagonal + reach.right + 1
    if reach.chunk < UNLIMITED:
        chunk_begin = begin + (diagonal - begin) // reach.chunk * reach.chunk
        start, stop = torch.maximum(start, chunk_begin), torch.minimum(stop, chunk_begin + reach.chunk)
    return start.clamp(begin, end).to(torch.int32), stop.clamp(begin, end).to(torch.int32)


def widen_to_spans(seen: Intervals, documents: Intervals, spans: Tensor) -> Intervals:
    """Let every token of a span see the whole span.

    Args:
        seen: the intervals without spans.
        documents: the whole document of each row; spans end at its bounds.
        spans: (T_q,) ids, 0 for tokens outside every span.
    """
    rows = torch.arange(spans.shape[0], device=spans.device)
    begin, end = _runs(changes(spans[None])[0] | (spans == 0), rows)
    begin = torch.maximum(begin.to(torch.int32), documents.start)
    end = torch.minimum(end.to(torch.int32), documents.stop)
    return seen._replace(start=torch.minimum(seen.start, begin), stop=torch.maximum(seen.stop, end), seen_by=None)


def document_starts(position_ids: Tensor) -> Tensor:
    """Find the tokens at which documents begin, from position ids.

    In the (3, B, T) form a text token has the same number three times, documents begin with text, and the patches of an
    image or a video ascend lexicographically. So a document begins where the triples don't ascend, and between two
    text tokens whose step isn't +1.

    Args:
        position_ids: in the shapes of `BlockDiagonalMask.from_position_ids`.

    Returns:
        (B, T) bool, True at the first token of every document (B = 1 for a one-dimensional argument).

    Raises:
        ValueError: wrong dtype or shape.
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


def changes(ids: Tensor) -> Tensor:
    """True at the begin of each (B, T) row and where a value differs from the value before."""
    return torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)


def number_documents(first: Tensor) -> Tensor:
    """The number of each row's document, (T,) int32; `first` says whether a document begins at the row."""
    return (first.cumsum(0, dtype=torch.int32) - 1).clamp(min=0)


def _by_kernel(ids: Tensor, rule: str, reach: Reach) -> Intervals:
    from tritonpack.kernels.intervals import intervals_of_ids

    start, stop, diagonal, begin, seen_by = intervals_of_ids(ids, rule, *reach)
    return Intervals(start, stop, diagonal, partial(_document_of_rows, begin, diagonal), seen_by)


def _document_of_rows(begin: Tensor, row: Tensor) -> Tensor:
    """The number of each row's document, from the document's first row."""
    return number_documents(begin == row)


def _runs(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of each row's run, from one start to the next."""
    total = starts.shape[0]
    if not total:
        return rows, rows
    begin = torch.where(starts, rows, 0).cummax(0).values
    # The next start after each row, by a scan from the right.
    following = torch.where(starts, rows, total).flip(0).cummin(0).values.flip(0)
    return begin, torch.cat([following[1:], following.new_full((1,), total)])

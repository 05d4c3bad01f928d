"""BlockDiagonalMask: which keys each query of a packed batch sees, as two integers per query.

All rows of a batch form one stream of queries and one of keys. Query `i` sees exactly the keys
`key_start[i] <= j < key_stop[i]`, and neither array ever decreases. Causal and bidirectional packing, sliding windows,
padding, cross-attention and the shards of sequence parallelism are all of this form (docs/math.md, section 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import (
    Lengths,
    Window,
    as_offsets,
    check_documents,
    check_indices,
    check_rows,
    check_total,
    check_window,
    describe,
    offsets_from_lengths,
    require,
)


@dataclass(frozen=True, eq=False)
class BlockDiagonalMask:
    """An attention mask in which every query sees one contiguous interval of keys.

    Two documents of 3 and 2 tokens, causal, and one row of slack that belongs to neither:

    >>> mask = BlockDiagonalMask.from_cu_seqlens([0, 3, 5], total_q=6)
    >>> mask.key_start.tolist()
    [0, 0, 0, 3, 3, 5]
    >>> mask.key_stop.tolist()
    [1, 2, 3, 4, 5, 5]
    >>> mask.to_dense().int()[3].tolist()  # the second document's first token sees itself alone
    [0, 0, 0, 1, 0, 0]
    >>> mask.transpose().key_stop.tolist()  # key 0 is seen by queries 0, 1, 2
    [3, 3, 3, 5, 5, 6]

    The constructors never wait for an accelerator. Values that already lie in host memory are checked on the spot and
    raise ValueError; values on an accelerator are checked there (a device-side assertion), or on demand by
    `validate()`.

    Attributes:
        key_start: (num_queries,) int32, the first key that each query sees; never decreases.
        key_stop: (num_queries,) int32, one past the last key that each query sees; never decreases, and equals
            `key_start` in rows that see nothing (padding and slack).
        num_keys: the length of the key stream.
        diagonal: (num_queries,) int32, the key at each query's own place, from which distances count (ALiBi); None
            where there is no such key, as in a transpose. It may lie outside the keys.
        document: (num_queries,) int32, the number of each query's document in the order of the stream; None where
            it isn't known. Rows outside every document hold any document's number.
        max_documents: how many documents there are at most, where the host knows.
        kept: what was computed from the mask before.
    """

    key_start: Tensor
    key_stop: Tensor
    num_keys: int
    diagonal: Tensor | None = None
    document: Tensor | None = None
    max_documents: int | None = None
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("key_start", "key_stop", "diagonal", "document"):
            rows = getattr(self, name)
            if rows is None and name in ("diagonal", "document"):
                continue
            if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.dtype != torch.int32:
                raise ValueError(f"{name} must be a one-dimensional int32 tensor; got {describe(rows)}.")
            if rows.shape != self.key_start.shape or rows.device != self.key_start.device:
                raise ValueError(
                    f"key_start and {name} must have the same length and device; got "
                    f"{describe(self.key_start)} and {describe(rows)}."
                )
        if self.num_keys < 0:
            raise ValueError(f"num_keys must not be negative; got {self.num_keys}.")

    @property
    def num_queries(self) -> int:
        return self.key_start.shape[0]

    @property
    def device(self) -> torch.device:
        return self.key_start.device

    def __repr__(self) -> str:
        return f"BlockDiagonalMask(num_queries={self.num_queries}, num_keys={self.num_keys}, device={self.device})"

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_seqlens(
        cls,
        seqlens: Lengths,
        seqlens_k: Lengths | None = None,
        *,
        causal: bool = True,
        window: Window = (-1, -1),
        device: torch.device | str | None = None,
    ) -> BlockDiagonalMask:
        """The mask of documents laid end to end.

        Args:
            seqlens: tokens per document on the query side, integers >= 0, in host memory.
            seqlens_k: the same on the key side, for cross-attention; None means the same lengths.
            causal: whether a query sees no later key. With unequal lengths the diagonal ends in the bottom right
                corner.
            window: (left, right) keys around the diagonal, both inclusive, -1 without limit, as FlashAttention defines
                it; `causal` sets right to 0.
            device: where the mask lies; None means the CPU.

        Raises:
            ValueError: negative or non-integer lengths, lengths on an accelerator, a different number of documents.

        >>> BlockDiagonalMask.from_seqlens([2, 1], [3, 2]).key_stop.tolist()
        [2, 3, 5]
        """
        cu_seqlens = offsets_from_lengths(seqlens, "seqlens")
        cu_seqlens_k = cu_seqlens if seqlens_k is None else offsets_from_lengths(seqlens_k, "seqlens_k")
        total_q, total_k = int(cu_seqlens[-1]), int(cu_seqlens_k[-1])
        check_documents(cu_seqlens, cu_seqlens_k)
        target = torch.device("cpu" if device is None else device)
        return cls.from_cu_seqlens(
            cu_seqlens.to(target, non_blocking=True),
            None if seqlens_k is None else cu_seqlens_k.to(target, non_blocking=True),
            causal=causal,
            window=window,
            total_q=total_q,
            total_k=total_k,
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Lengths,
        cu_seqlens_k: Lengths | None = None,
        *,
        causal: bool = True,
        window: Window = (-1, -1),
        total_q: int | None = None,
        total_k: int | None = None,
    ) -> BlockDiagonalMask:
        """The mask of documents given by cumulative offsets, as FlashAttention's varlen functions take them.

        Args:
            cu_seqlens: (documents + 1,) int32 or int64, starts with 0, never decreases; a repeated offset is an empty
                document, so a fixed-capacity tensor may repeat its last offset.
            cu_seqlens_k: the same on the key side; None means the same offsets.
            causal, window: see `from_seqlens`.
            total_q: rows of the query stream. Rows past the last offset are slack: they see nothing and nothing sees
                them. None means the last offset, which is possible only for offsets in host memory.
            total_k: the same on the key side.

        Raises:
            ValueError: wrong dtype or shape; a missing total for offsets on an accelerator; and, for offsets in host
                memory, offsets that decrease, don't begin with 0 or exceed the total.
        """
        window = check_window(window, causal)
        cu_q = as_offsets(cu_seqlens, "cu_seqlens")
        cu_k = cu_q if cu_seqlens_k is None else as_offsets(cu_seqlens_k, "cu_seqlens_k")
        if cu_seqlens_k is None and total_k is None:
            total_k = total_q
        if cu_q.device != cu_k.device:
            raise ValueError(f"cu_seqlens is on {cu_q.device} and cu_seqlens_k on {cu_k.device}; move them together.")
        check_documents(cu_q, cu_k)
        total_q = check_total(cu_q, total_q, "total_q", "cu_seqlens")
        total_k = check_total(cu_k, total_k, "total_k", "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k")

        rows = torch.arange(total_q, device=cu_q.device)
        # The last document that starts at or before the row; slack rows land one past the last document, whose bounds
        # are the empty interval [cu[-1], cu[-1]).
        document = torch.searchsorted(cu_q, rows, right=True) - 1
        following = (document + 1).clamp(max=cu_q.shape[0] - 1)
        return _from_bounds(
            rows,
            cu_q[document],
            cu_q[following],
            cu_k[document],
            cu_k[following],
            total_k,
            window,
            document.clamp(max=max(cu_q.shape[0] - 2, 0)),
            max_documents=cu_q.shape[0] - 1,
        )

    @classmethod
    def from_position_ids(
        cls, position_ids: Tensor, *, causal: bool = True, window: Window = (-1, -1)
    ) -> BlockDiagonalMask:
        """The mask of a packed batch that marks its documents by position ids alone.

        A document begins at the start of every row and wherever the step from the token before isn't +1; positions
        may start anywhere. Padding can't be seen in position ids: pass segment ids or a padding mask for that.

        Args:
            position_ids: integers, (T,), (B, T), or the multimodal forms (3, B, T) (time, height, width, where the
                patches of an image ascend in that order: see `document_starts`) and (4, B, T) (text positions
                first; documents are read from those).
            causal, window: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape.

        >>> ids = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 0, 1, 2]])
        >>> BlockDiagonalMask.from_position_ids(ids).key_start.tolist()
        [0, 0, 0, 3, 3, 5, 5, 7, 7, 7]
        """
        window = check_window(window, causal)
        return mask_from_runs(document_starts(position_ids), None, window)

    @classmethod
    def from_segment_ids(
        cls, segment_ids: Tensor, *, causal: bool = True, window: Window = (-1, -1)
    ) -> BlockDiagonalMask:
        """The mask of rows whose tokens carry the number of their document, 0 for padding.

        Args:
            segment_ids: (T,) or (B, T) integers >= 0. Within a row the tokens of a document are contiguous.
            causal, window: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape; and, for ids in host memory, negative ids or a document in several pieces.
        """
        window = check_window(window, causal)
        ids = check_rows(segment_ids, "segment_ids")
        starts, in_order = changes(ids), ids.sort(dim=1).values
        pieces = (starts & (ids != 0)).sum(1)
        documents = (changes(in_order) & (in_order != 0)).sum(1)
        require(
            (pieces == documents).all() & (ids >= 0).all(),
            "segment_ids must not be negative, and the tokens of a document must be contiguous within their row (0 is "
            "padding); renumber the pieces, or move the tokens of each document together.",
        )
        return mask_from_runs(starts, ids != 0, window)

    @classmethod
    def from_padding_mask(
        cls, attention_mask: Tensor, *, causal: bool = True, window: Window = (-1, -1)
    ) -> BlockDiagonalMask:
        """The mask of a padded batch, flattened row after row; no token is moved.

        Args:
            attention_mask: (B, T) or (T,) bool or integers, nonzero for tokens and 0 for padding on the left, the
                right or both sides; the tokens of a row are contiguous.
            causal, window: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape; and, for a mask in host memory, a row with padding between its tokens.
        """
        window = check_window(window, causal)
        live = check_rows(attention_mask, "attention_mask", allow_bool=True) != 0
        starts = changes(live)
        require(
            ((starts & live).sum(1) <= 1).all(),
            "attention_mask has padding between the tokens of a row; padding may lie on the left and on the right "
            "only. For several documents in a row use from_segment_ids.",
        )
        return mask_from_runs(starts, live, window)

    # --------------------------------------------------------------------------------------------------- operations

    def transpose(self) -> BlockDiagonalMask:
        """The queries that each key is seen by, again as intervals; computed once and kept.

        Key j is seen from the first query whose interval reaches past j to the first whose interval begins past it.
        """
        if "transpose" not in self.kept:
            rows = torch.arange(self.num_keys, device=self.device, dtype=torch.int32)
            query_start = torch.searchsorted(self.key_stop, rows, right=True, out_int32=True)
            query_stop = torch.searchsorted(self.key_start, rows, right=True, out_int32=True)
            document = None
            if self.document is not None and self.num_queries:
                document = self.document[query_start.clamp(max=self.num_queries - 1)]
            self.kept["transpose"] = BlockDiagonalMask(
                query_start, query_stop, self.num_queries, document=document, max_documents=self.max_documents
            )
        return self.kept["transpose"]

    def restrict(self, query_rows: Tensor | None = None, key_positions: Tensor | None = None) -> BlockDiagonalMask:
        """The mask between some of the queries and some of the keys: one rank's shard, one block of a ring.

        Args:
            query_rows: (R,) int32 or int64, ascending indices into the query stream; None keeps all.
            key_positions: (K,) int32 or int64, ascending indices into the key stream; None keeps all.

        Returns:
            The mask of R queries and K keys, numbered as the arguments list them.

        Raises:
            ValueError: wrong dtype or shape; and, for indices in host memory, indices out of range or not ascending.

        >>> mask = BlockDiagonalMask.from_seqlens([4, 2])
        >>> mask.restrict(torch.tensor([1, 3, 5]), torch.tensor([0, 3, 4])).to_dense().int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        start, stop, num_keys = self.key_start, self.key_stop, self.num_keys
        diagonal, document = self.diagonal, self.document
        if query_rows is not None:
            rows = check_indices(query_rows, "query_rows", self.num_queries, self.device)
            start, stop = start[rows], stop[rows]
            diagonal, document = (None if x is None else x[rows] for x in (diagonal, document))
        if key_positions is not None:
            keys = check_indices(key_positions, "key_positions", num_keys, self.device).to(torch.int32)
            start = torch.searchsorted(keys, start, out_int32=True)
            stop = torch.searchsorted(keys, stop, out_int32=True)
            num_keys, diagonal = keys.shape[0], None  # keys that are left out break the count of distances
        return BlockDiagonalMask(start, stop, num_keys, diagonal, document, self.max_documents)

    def to_dense(self) -> Tensor:
        """The mask as (num_queries, num_keys) bool, True where a query sees a key: O(T^2) memory."""
        keys = torch.arange(self.num_keys, device=self.device)
        return (keys >= self.key_start[:, None]) & (keys < self.key_stop[:, None])

    def to(self, device: torch.device | str) -> BlockDiagonalMask:
        """The same mask on another device."""
        diagonal, document = (None if x is None else x.to(device) for x in (self.diagonal, self.document))
        return BlockDiagonalMask(self.key_start.to(device), self.key_stop.to(device), self.num_keys, diagonal, document)

    def validate(self) -> BlockDiagonalMask:
        """Check the values, waiting for the device where it must.

        Returns:
            The mask itself.

        Raises:
            ValueError: an interval that lies outside the keys, ends before it begins, or begins or ends earlier than
                the row before; the message names the first such row.
        """
        start, stop = self.key_start.cpu().long(), self.key_stop.cpu().long()
        faults = (
            ((start < 0) | (stop > self.num_keys), f"reaches outside the {self.num_keys} keys"),
            (stop < start, "ends before it begins"),
            (_falls(start) | _falls(stop), "begins or ends before that of the row above it"),
        )
        for wrong, what in faults:
            if wrong.any():
                row = int(wrong.nonzero()[0, 0])
                raise ValueError(
                    f"row {row} of the mask sees keys [{int(start[row])}, {int(stop[row])}), which {what}; intervals "
                    "must lie within the keys and never decrease. Check the offsets, ids or indices that the mask was "
                    "built from."
                )
        return self


def document_starts(position_ids: Tensor) -> Tensor:
    """Where documents begin in rows of position ids.

    In the (3, B, T) form, text tokens carry one number three times and documents begin with such a token; the patches
    of an image or a video ascend lexicographically. So a document begins where the triples don't ascend, and where
    one text token follows another by a step other than +1.

    Args:
        position_ids: as `BlockDiagonalMask.from_position_ids` takes them.

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
        text = (position_ids == time).all(0)
        step_t, step_h, step_w = position_ids.long().diff(dim=2)
        ascends = (step_t > 0) | (step_t == 0) & ((step_h > 0) | (step_h == 0) & (step_w > 0))
        begins = ~ascends | (begins & text[:, 1:] & text[:, :-1])
    return torch.cat([torch.ones_like(time[:, :1], dtype=torch.bool), begins], dim=1)


def mask_from_runs(starts: Tensor, live: Tensor | None, window: Window) -> BlockDiagonalMask:
    """The mask of (B, T) rows cut into runs at `starts`; runs that aren't `live` see nothing and nothing sees them."""
    starts = starts.reshape(-1)
    total = starts.shape[0]
    rows = torch.arange(total, device=starts.device)
    begin = torch.where(starts, rows, 0).cummax(0).values if total else rows
    # The next start at or after row i + 1, scanned from the right.
    following = torch.where(starts, rows, total).flip(0).cummin(0).values.flip(0) if total else rows
    end = torch.cat([following[1:], following.new_full((min(total, 1),), total)])
    live = None if live is None else live.reshape(-1)
    key_end = end if live is None else torch.where(live, end, begin)
    document = (starts if live is None else starts & live).cumsum(0) - 1
    return _from_bounds(rows, begin, end, begin, key_end, total, window, document.clamp(min=0))


def _from_bounds(
    rows: Tensor,
    query_begin: Tensor,
    query_end: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    num_keys: int,
    window: Window,
    document: Tensor,
    max_documents: int | None = None,
) -> BlockDiagonalMask:
    """Intervals from the bounds of each row's document (all (T_q,)), a window around the bottom-right diagonal."""
    left, right = window
    diagonal = rows - query_end + key_end  # the key that the row's own token would be, counted from the documents' ends
    start = key_begin if left < 0 else torch.clamp(diagonal - left, key_begin, key_end)
    stop = key_end if right < 0 else torch.clamp(diagonal + right + 1, key_begin, key_end)
    start, stop, diagonal, document = (x.to(torch.int32) for x in (start, stop, diagonal, document))
    return BlockDiagonalMask(start, stop, num_keys, diagonal, document, max_documents)


def changes(ids: Tensor) -> Tensor:
    """True where a (B, T) row begins and where its value differs from the one before."""
    return torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)


def _falls(values: Tensor) -> Tensor:
    falls = torch.zeros_like(values, dtype=torch.bool)
    falls[1:] = values[1:] < values[:-1]
    return falls

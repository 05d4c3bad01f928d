"""What a forward pass says about its documents, and the interval masks that follow from it.

A `Packing` takes the place of the model's `attention_mask` argument: transformers hands it, untouched, to the
registered mask function, once per kind of mask; what that returns, an `IntervalMask`, goes to every layer as
`attention_mask`. So the packing travels with the call and no state outlives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import Window, require
from tritonpack.mask import BlockDiagonalMask, changes, document_starts, mask_from_runs


@dataclass(frozen=True)
class IntervalMask:
    """A `BlockDiagonalMask` that looks like the 4D tensor which transformers' code expects between a model and its
    layers.

    Attributes:
        mask: batch_size * num_queries rows, batch_size * num_keys keys, row after row.
        shape: (batch_size, 1, num_queries, num_keys).
        backend: as `varlen_attention` takes it; None until a patched decoder has claimed the mask.
    """

    mask: BlockDiagonalMask
    shape: torch.Size
    backend: str | None
    dtype: torch.dtype = torch.bool
    ndim: int = 4

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def to(self, *args: Any, **kwargs: Any) -> IntervalMask:
        device = kwargs.get("device", args[0] if args and isinstance(args[0], (str, torch.device)) else None)
        if device is None or torch.device(device) == self.device:
            return self
        return replace(self, mask=self.mask.to(device))

    def contiguous(self) -> IntervalMask:
        return self


@dataclass(frozen=True)
class Packing:
    """The documents of one forward pass; looks like a 2D padding mask.

    Attributes:
        attention_mask: (B, keys) int, 0 for padding, or None. Other numbers tell documents apart.
        position_ids: (B, T), (3, B, T) or (4, B, T) integers, or None for consecutive positions.
        boundaries: (B, T) bool, True where a document begins, where the caller said so outright; else None.
        shape: (B, T) of the tokens.
        device: of the tokens.
        backend: as `varlen_attention` takes it.
    """

    attention_mask: Tensor | None
    position_ids: Tensor | None
    boundaries: Tensor | None
    shape: torch.Size
    device: torch.device
    backend: str
    ndim: int = 2
    _masks: list[tuple[tuple[Any, ...], IntervalMask]] = field(default_factory=list)

    def to(self, *_: Any, **__: Any) -> Packing:
        return self

    def interval_mask(
        self, num_keys: int, query_offset: int | Tensor, key_offset: int, sliding_window: int | None
    ) -> IntervalMask:
        """The mask of a layer; built once for all layers of one kind.

        Args:
            num_keys: keys per row that the layer attends to.
            query_offset: how many tokens of each row the cache holds; a tensor for caches of fixed size.
            key_offset: how many of those the layer's cache has forgotten.
            sliding_window: keys that a query sees at most, itself included; None without limit.
        """
        fresh = isinstance(query_offset, int) and query_offset == 0 and key_offset == 0 and num_keys == self.shape[1]
        kind = (num_keys, key_offset, sliding_window)
        for known, interval_mask in self._masks:  # a list: a compiled graph that hashes a size is tied to it
            if known == kind:
                return interval_mask
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        mask = self._documents(window) if fresh else self._cached(num_keys, query_offset, key_offset, window)
        interval_mask = IntervalMask(mask, torch.Size((self.shape[0], 1, self.shape[1], num_keys)), self.backend)
        self._masks.append((kind, interval_mask))
        return interval_mask

    def _documents(self, window: Window) -> BlockDiagonalMask:
        """Queries and keys are the same tokens: every row is cut into its documents."""
        starts = self.boundaries
        if starts is None:
            starts = self._position_starts()
        if self.attention_mask is None:
            return mask_from_runs(starts, None, window)
        ids = self.attention_mask
        if ids.shape != self.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(ids.shape)} but the tokens have {tuple(self.shape)}; without a "
                "cache they must be "
                "the same. Four-dimensional masks are not supported by a patched model: mark documents by position_ids."
            )
        pieces = changes(ids)
        seen_before = torch.cat([torch.zeros_like(ids[:, :1]), ids.cummax(1).values[:, :-1]], dim=1)
        require(
            ~(pieces & ~starts & (ids != 0) & (ids <= seen_before)).any() & (ids >= 0).all(),
            "attention_mask has padding inside a document. Padding may lie before, between and after documents; "
            "number documents "
            "in ascending order, or let position_ids restart where one begins.",
        )
        return mask_from_runs(starts | pieces, ids != 0, window)

    def _cached(self, num_keys: int, query_offset: int | Tensor, key_offset: int, window: Window) -> BlockDiagonalMask:
        """Queries continue what the cache holds: a token at position p follows p tokens of its own document."""
        if self.boundaries is not None:
            raise ValueError(
                "cu_seq_lens_q, seq_idx and cu_seqlens describe a batch of whole documents, but the cache already "
                "holds tokens. Pass "
                "position_ids alone when continuing from a cache, or past_key_values=None."
            )
        batch, length = self.shape
        begin = torch.zeros((batch, 1), dtype=torch.long, device=self.device)
        if self.attention_mask is not None:
            begin = first_tokens(self.attention_mask)[:, None]
        rows = (torch.arange(length, device=self.device) + query_offset).expand(batch, length)  # counted with the cache
        if self.position_ids is not None:
            starts = self._position_starts()
            starts[:, 0] = False  # the first token continues, by as many tokens as its position says
            positions = self.position_ids[0] if self.position_ids.ndim == 3 else self.position_ids
            first = rows[:, :1] - positions.expand(batch, length)[:, :1]
            inner = torch.where(starts, rows, -1).cummax(1).values
            begin = torch.maximum(begin, torch.where(inner < 0, first, inner))
        return cached_mask(rows, begin, num_keys, key_offset, window)

    def _position_starts(self) -> Tensor:
        if self.position_ids is None:
            starts = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            starts[:, :1] = True
            return starts
        starts = document_starts(self.position_ids)
        if starts.shape[1] != self.shape[1] or starts.shape[0] not in (1, self.shape[0]):
            raise ValueError(
                f"position_ids of shape {tuple(self.position_ids.shape)} don't fit tokens of shape {tuple(self.shape)}."
            )
        return starts.expand(self.shape).clone()


def first_tokens(attention_mask: Tensor) -> Tensor:
    """(B,) the first token of each row that isn't padding; requires that no padding lies between tokens."""
    live = attention_mask != 0
    require(
        ((changes(live) & live).sum(1) <= 1).all(),
        "attention_mask has padding between the tokens that the cache holds and new ones; pad on the left when "
        "generating.",
    )
    return live.int().argmax(1)


def cached_mask(rows: Tensor, begin: Tensor, num_keys: int, key_offset: int, window: Window) -> BlockDiagonalMask:
    """Causal intervals of (B, T) token indices `rows`, which see nothing before `begin`; keys begin at `key_offset`."""
    left, _ = window
    start = torch.maximum(begin, rows - left) if left >= 0 else begin.expand_as(rows)
    base = torch.arange(rows.shape[0], device=rows.device)[:, None] * num_keys
    stop = (rows + 1 - key_offset).clamp(0, num_keys)
    start = torch.minimum((start - key_offset).clamp(0, num_keys), stop)
    start, stop = ((base + bound).flatten().to(torch.int32) for bound in (start, stop))
    return BlockDiagonalMask(start, stop, rows.shape[0] * num_keys)


def read_packing(arguments: dict[str, Any], backend: str) -> Any:
    """The `attention_mask` argument that carries the packing of a forward pass, from the arguments it was called with.

    A mask that generate() has prepared already is claimed for the backend; what isn't two-dimensional is left for
    attention to refuse.

    Documents are told apart by `cu_seq_lens_q` (FlashAttention's offsets over the flattened tokens), else `seq_idx`
    ((B, T) document numbers), else where `position_ids` don't ascend by one. A two-dimensional `attention_mask` marks
    padding by 0, and may number documents.

    Raises:
        ValueError: arguments that contradict each other or the tokens.
    """
    attention_mask = arguments.get("attention_mask")
    if isinstance(attention_mask, dict):
        return {kind: _claim(mask, backend) for kind, mask in attention_mask.items()}
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
        return _claim(attention_mask, backend)
    tokens = arguments.get("input_ids")
    if tokens is None:
        tokens = arguments.get("inputs_embeds")
    if tokens is None:
        return attention_mask  # the model itself says what is missing
    shape, device = torch.Size(tokens.shape[:2]), tokens.device
    if attention_mask is not None:
        if attention_mask.is_floating_point():
            raise ValueError(f"attention_mask must hold integers or bool; got {attention_mask.dtype}.")
        attention_mask = attention_mask.to(device=device, dtype=torch.int32)
    return Packing(
        attention_mask, arguments.get("position_ids"), _boundaries(arguments, shape, device), shape, device, backend
    )


def _claim(mask: Any, backend: str) -> Any:
    return replace(mask, backend=backend) if isinstance(mask, IntervalMask) else mask


def _boundaries(arguments: dict[str, Any], shape: torch.Size, device: torch.device) -> Tensor | None:
    cu_q, cu_k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if cu_q is not None:
        total = shape.numel()
        if cu_k is not None and cu_k is not cu_q:
            differ = "cu_seq_lens_q and cu_seq_lens_k differ; in self-attention they are the same."
            if cu_q.shape != cu_k.shape:
                raise ValueError(differ)
            require((cu_q == cu_k).all(), differ)
        require(
            (cu_q[0] == 0) & (cu_q[-1] == total) & (cu_q[1:] >= cu_q[:-1]).all(),
            lambda: (
                f"cu_seq_lens_q must begin with 0, never decrease and end with the number of tokens, {total} "
                f"({shape[0]} x {shape[1]})."
            ),
        )
        starts = torch.zeros(total + 1, dtype=torch.bool, device=device)
        starts[cu_q.to(device=device, dtype=torch.long)] = True
        starts = starts[:-1].view(shape)
    elif arguments.get("seq_idx") is not None:
        seq_idx = arguments["seq_idx"]
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)} but the tokens have {tuple(shape)}.")
        starts = changes(seq_idx.to(device))
    else:
        return None
    starts[:, :1] = True
    return starts

"""The documents of a forward pass, and the interval masks of its layers.

A `PackedBatch` replaces the model's `attention_mask` argument. transformers passes it unchanged to the registered mask
function, once for each kind of mask. Every layer gets the result as `attention_mask`. So the documents are passed with
the call, and no state is kept after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.attention import check_inputs, varlen_attention
from tritonpack.backends import Backend, resolve_backend
from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import BlockDiagonalMask, mask_from_intervals
from tritonpack.masks.intervals import changes, document_starts, from_runs, visible_keys
from tritonpack.masks.tree import forest_intervals
from tritonpack.ops import autocast, run_attention
from tritonpack.options import AttentionOptions, make_options
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskFunction, MaskSpec, overlay_intervals
from tritonpack.patches.tensor_like import TensorLike

ATTENTIONS = ("tritonpack", "sdpa", "eager")


@dataclass(frozen=True)
class Serving:
    """The attention implementation of a patched module.

    Attributes:
        attention: "tritonpack" for the kernels, which take intervals; "sdpa" or "eager" for transformers' own
            attention, or "dense" for layers outside of its interface, which take dense masks.
        backend: the backend of the kernels.
        require_active: raises if the model was unpatched.
        checked: a cache of checked options and backends, by shapes, dtypes and devices of q, k and v. It stays small,
            because layers and calls are alike.
    """

    attention: str
    backend: Backend
    require_active: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    checked: dict[Any, tuple[AttentionOptions, str]] = field(default_factory=dict, compare=False, repr=False)


class IntervalMask(TensorLike):
    """A `BlockDiagonalMask` in place of a 4D mask. A model that computes with it gets a bool tensor.

    Attributes:
        mask: the mask of all queries and keys, row after row.
        shape: (batch_size, 1, num_queries, num_keys).
        packed_batch: the documents of the tokens; None if the keys are other tokens, such as cached ones.
    """

    arguments: tuple[str, ...] = ("mask", "shape", "serving", "packed_batch", "spec")
    dtype, ndim = torch.bool, 4

    def __init__(
        self, mask: BlockDiagonalMask, shape: torch.Size, serving: Serving, packed_batch: PackedBatch | None = None,
        spec: MaskSpec = CAUSAL,
    ) -> None:  # fmt: skip
        self.mask, self.shape, self.serving, self.packed_batch, self.spec = mask, shape, serving, packed_batch, spec
        self.device = mask.key_start.device
        self.kept: dict[torch.dtype, Tensor] = {}
        self._lengths = shape[0] * shape[2], shape[0] * shape[3], shape[0] * shape[3]  # of q, k and v
        self._moved: BlockDiagonalMask | None = None  # copy on the device of the last layer on another device

    def for_keys(self, num_keys: int) -> IntervalMask:
        """Return this mask, or the mask of one new token that sees `num_keys` keys of a row.

        transformers reads the number of keys from the cache of one layer. In hybrid models that may be a recurrent
        layer, which caches no keys. The right number is the width of the padding mask (`PackedBatch.interval_mask`),
        or, without such a mask, the number of keys of the attention layer.
        """
        if self.packed_batch is None or self.shape[2] != 1 or num_keys == self.shape[3]:
            return self
        return self.packed_batch.interval_mask(num_keys, num_keys - 1, 0, self.spec)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float, sinks: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Attention: q (B * T, H, D), k (B * K, H_kv, D) and v (B * K, H_kv, D_v) -> (B * T, H, D_v)."""
        if sinks is not None or dropout_p or torch.compiler.is_compiling():
            mask = self.mask if self.device == q.device else self.mask.to(q.device)
            if self.packed_batch is not None and self.packed_batch.recomputed:
                mask = replace(mask, trusted=True)  # a copy, whose cached tables serve this layer alone
            return varlen_attention(
                q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
                backend=self.serving.backend,
            )  # fmt: skip
        q, k, v = autocast(q, k, v)
        mask = self.mask
        if self.device != q.device:
            moved = self._moved  # read once: threads of backward may recompute layers on several devices
            mask = moved if moved is not None and moved.device == q.device else self.mask.to(q.device)
            self._moved = mask
        form = (
            q.shape[1:], k.shape[1:], v.shape[1:], q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, scale,
            softcap,
        )  # fmt: skip
        checked = self.serving.checked.get(form)
        if checked is None or (q.shape[0], k.shape[0], v.shape[0]) != self._lengths:
            check_inputs(q, k, v, mask)
            checked = make_options(q, mask, scale=scale, softcap=softcap), resolve_backend(self.serving.backend, q)
            self.serving.checked[form] = checked
        return run_attention(q, k, v, mask, *checked)[0]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return (B, 1, T, K): bool, or additive in another dtype; made once for all layers."""
        if dtype not in self.kept:
            self.kept[dtype] = self.to_addend(dtype)
        return self.kept[dtype]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device", args[0] if args and isinstance(args[0], (str, torch.device)) else None)
        if any(isinstance(x, torch.dtype) and x != torch.bool for x in (*args, kwargs.get("dtype"))):
            return self.to_tensor().to(*args, **kwargs)
        if device is None or torch.device(device) == self.device:
            return self
        return self.replace(mask=self.mask.to(device))

    def to_addend(self, dtype: torch.dtype) -> Tensor:
        """Return the mask to be added to scores of this floating-point dtype; for any other dtype a bool mask."""
        return self.to_tensor(dtype, additive=True) if dtype.is_floating_point else self.to_tensor()

    def to_tensor(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        """Return the mask as (B, 1, T, K). A padding token sees itself if it is among the keys, because a softmax needs
        a key. No document sees padding."""
        self.serving.require_active()  # recomputed layers of an unpatched model get this mask, too
        if dtype == torch.float64:
            return self.to_tensor(torch.float32, additive=additive).double()
        batch, _, queries, keys = self.shape
        if self.mask.is_tree:
            places = torch.arange(batch * keys, device=self.device).view(batch, keys)
            seen = torch.stack([self.mask.restrict(row, row).to_dense() for row in places])[:, None]
            seen |= torch.eye(keys, dtype=torch.bool, device=self.device) & ~seen.any(-1, keepdim=True)
            return as_addend(seen, dtype) if additive else seen.to(dtype)
        base = torch.arange(batch, device=self.device, dtype=torch.int32)[:, None] * keys
        start, stop = (x.view(batch, queries) - base for x in (self.mask.key_start, self.mask.key_stop))
        if queries == keys:
            own = torch.arange(keys, device=self.device, dtype=torch.int32)
            start, stop = torch.where(start < stop, start, own), torch.where(start < stop, stop, own + 1)
        # One row for each query; its keys are the keys of its own row of the batch.
        rows = BlockDiagonalMask(start.flatten(), stop.flatten(), keys, trusted=True)
        return rows.to_dense(dtype, additive=additive).unflatten(0, (batch, 1, queries))


class PackedBatch(TensorLike):
    """The documents of one forward pass, in place of a 2D padding mask.

    Attributes:
        attention_mask: (B, keys) int, 0 for padding, or None. Other numbers number documents.
        position_ids: (B, T), (3, B, T) or (4, B, T) integers, or None for consecutive positions.
        boundaries: (B, T) bool, True where a document begins, read from offsets or document numbers; else None.
        tokens: (B, T), the shape of the tokens.
        by_document: whether layers that mix along the row run on each document by itself.
        cached: whether the call passes a cache, empty or not.
        filler: (B, T) bool, True for the padding token, if no mask marks padding; else None.
        tree_ends: (B, T) integers, the end of each token's subtree, counted from the beginning of its row, if the rows
            hold trees; else None. It may lie in host memory, where masks of trees are made faster.
        row: the `Row` with the places of the user's tokens, if this is the one row made of them; else None.
        causal: whether documents were read from a causal mask of pairs of tokens, so no layer may see later tokens.
        shared: whether it is one rank's part of a batch.
        marks_documents: whether any argument of the call can mark several documents of a row.
        positions_counted: whether the patch, and not the model, counted the positions of the call.
        compacted: whether the compaction has handled this batch: made a row of it, or left it unchanged.
        recomputed: whether layers of a graph run again in backward. Such a layer can't cache anything for the next one.
    """

    arguments: tuple[str, ...] = (
        "attention_mask", "position_ids", "boundaries", "tokens", "device", "serving", "by_document", "cached",
        "filler", "tree_ends", "row", "causal", "positions_counted",
    )  # fmt: skip
    dtype, ndim = torch.int64, 2

    by_document = cached = causal = positions_counted = shared = recomputed = compacted = False
    filler: Tensor | None = None
    tree_ends: Tensor | None = None
    row: Any = None

    def __init__(
        self, attention_mask: Tensor | None, position_ids: Tensor | None, boundaries: Tensor | None,
        tokens: torch.Size, device: torch.device, serving: Serving, **others: Any,
    ) -> None:  # fmt: skip
        self.attention_mask, self.position_ids, self.boundaries = attention_mask, position_ids, boundaries
        self.tokens, self.device, self.serving = tokens, device, serving
        for name, value in others.items():
            setattr(self, name, value)
        self.shape = tokens if attention_mask is None else attention_mask.shape
        self.kept: list[tuple[tuple[Any, ...], IntervalMask]] = []
        self.marks_documents = not (attention_mask is position_ids is boundaries is self.tree_ends is None)
        self.document_batches: list[Any] = []  # by `batches_of`
        self._kept_runs: tuple[Tensor, Tensor | None] | None = None
        self.kept_boundaries: dict[str, Tensor] = {}

    def to(self, *_: Any, **__: Any) -> PackedBatch:
        return self

    def to_tensor(self) -> Tensor:
        """Return (B, keys) int64, 1 for tokens and 0 for padding, as a tokenizer's mask."""
        return self.not_padding().long()

    def not_padding(self) -> Tensor:
        """Return (B, keys) bool, True for tokens that aren't padding.

        Without a mask, documents at the end of a row that hold only the padding token are padding, because collators
        fill rows up with it. The first document of a row is never padding.
        """
        if self.attention_mask is not None:
            return self.attention_mask != 0
        if self.tree_ends is not None:
            places = torch.arange(self.tokens[1], device=self.tree_ends.device)
            return (self.tree_ends > places).to(self.device)
        if self.filler is None or not self.marks_documents:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        tail = (~self.filler).flip(1).cumsum(1).flip(1) == 0  # only padding tokens from here on
        begins = self.runs()[0] & tail
        begins[:, 0] = False
        return begins.cumsum(1) == 0

    def long(self) -> PackedBatch:
        return self

    def cumsum(self, dim: int = -1, **options: Any) -> Tensor:
        """Number the tokens of each document from 1, with 0 for padding. Models count positions by this sum of their
        mask."""
        if self.shape != self.tokens or dim not in (-1, 1):
            return self.to_tensor().cumsum(dim, **options)
        return (self.positions() + 1) * self.to_tensor()

    def interval_mask(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> IntervalMask:
        """Return the mask of a layer with `num_keys` keys per row. It is made once for all layers of one kind.

        Args:
            query_offset: the number of tokens of each row in the cache; a tensor for caches of fixed size.
            key_offset: the number of these tokens that the layer's cache has dropped.
        """
        if self.causal and spec.overlay is None and spec.reach.right != 0:
            raise ValueError(
                "attention_mask is a causal mask of pairs of tokens, but layers of this model see both directions. "
                "Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask that numbers them."
            )
        columns = self.shape[1]
        if isinstance(query_offset, int) and query_offset == 0 and num_keys == self.tokens[1] < columns:
            num_keys, query_offset = columns, columns - num_keys  # see `IntervalMask.for_keys`
        fresh = isinstance(query_offset, int) and query_offset == 0 and key_offset == 0 and num_keys == self.tokens[1]
        key = (num_keys, key_offset, spec)
        for known, interval_mask in self.kept:  # a list, because a hashed size becomes a constant of a graph
            if known == key:
                return interval_mask
        if not fresh:
            mask = self._cached(num_keys, query_offset, key_offset, spec)
        elif self.tree_ends is not None:
            mask = self._tree(self.tree_ends, spec)
        elif spec.overlay is not None:
            mask = self._overlaid(spec.overlay)
        else:
            mask = mask_from_intervals(partial(from_runs, *self.runs()), spec.reach)
        shape = torch.Size((self.tokens[0], 1, self.tokens[1], num_keys))
        interval_mask = IntervalMask(mask, shape, self.serving, self if fresh else None, spec)
        if not torch.compiler.is_compiling():  # a graph can't change its inputs
            self.kept.append((key, interval_mask))
        return interval_mask

    def document_mask(self) -> IntervalMask:
        """Return the mask with which every token sees its whole document."""
        return self.interval_mask(self.tokens[1], 0, 0, WHOLE_DOCUMENT)

    def _overlaid(self, overlay: MaskFunction) -> BlockDiagonalMask:
        whole = mask_from_intervals(partial(from_runs, *self.runs()), WHOLE_DOCUMENT.reach)
        base = self._base(self.tokens[1])
        begin, end = (bound.view(self.tokens) - base for bound in (whole.key_start, whole.key_stop))
        bounds = overlay_intervals(overlay, self._rows(0), begin.long(), end.long(), self.tokens[1])
        start, stop = ((bound + base).flatten().to(torch.int32) for bound in bounds)
        return replace(whole, key_start=start, key_stop=stop, trusted=True)

    def _tree(self, ends: Tensor, spec: MaskSpec) -> BlockDiagonalMask:
        if spec.reach.right != 0 or spec.overlay is not None:
            raise UnsupportedModelError(
                "in a tree each token sees the tokens before it, but a layer of this model "
                + ("composes a mask of its own" if spec.overlay is not None else "also sees the tokens after it")
                + ". Leave tree_ends and share_prefixes out, and pass each sequence as a document."
            )
        mask = mask_from_intervals(partial(forest_intervals, ends, "ends"), spec.reach)
        return mask if mask.device == self.device else mask.to(self.device)

    def runs(self) -> tuple[Tensor, Tensor | None]:
        """Return (B, T) bool: starts of documents and of runs of padding, and tokens without padding (None: all)."""
        if self._kept_runs is not None:
            return self._kept_runs
        starts, live = self.boundaries, None
        if self.tree_ends is not None:
            live = self.not_padding()
            starts = changes(live) | (live & (self.positions() == 0))
        elif starts is None and self.position_ids is not None:
            starts = document_starts(self.position_ids).expand(self.tokens)
        elif starts is None:
            starts = torch.zeros(self.tokens, dtype=torch.bool, device=self.device)
            starts[:, :1] = True
        if self.attention_mask is not None:
            ids, begins, live = self.attention_mask, starts, self.attention_mask != 0
            if ids.shape != self.tokens:
                raise ValueError(
                    f"attention_mask has shape {tuple(ids.shape)} but the tokens have {tuple(self.tokens)}; without a "
                    "cache they must be the same."
                )
            pieces = changes(ids)
            resumed = pieces & ~begins & live & (ids <= pad(ids.cummax(1).values[:, :-1], (1, 0)))
            require(
                ~resumed.any(),
                lambda: (
                    f"attention_mask has padding inside a document{excerpt(resumed, ids, begins)}. Padding may lie "
                    "before, between and after documents. Number documents in ascending order, or let position_ids "
                    "restart where one begins. If virtual tokens (PEFT's) stand before each row, pad on the right."
                ),
            )
            starts = begins | pieces
        self._kept_runs = starts, live
        return self._kept_runs

    def positions(self) -> Tensor:
        """Return (B, T) int64, each token's position in its document, counted from 0; in a tree its depth."""
        if self.tree_ends is not None:
            depth = self.interval_mask(self.tokens[1], 0, 0, CAUSAL).mask.diagonal
            assert depth is not None
            return depth.view(self.tokens).long()
        starts, _ = self.runs()
        rows = torch.arange(self.tokens[1], device=self.device)
        return rows - torch.where(starts, rows, 0).cummax(1).values

    def continued_positions(self) -> Tensor:
        """Return (B, T) int64, each token's position in its document, if the mask may also cover cached tokens."""
        assert self.attention_mask is not None
        if self.shape == self.tokens:
            return self.positions()
        places = torch.arange(self.shape[1], device=self.device) - first_tokens(self.attention_mask)[:, None]
        return places[:, -self.tokens[1] :].clamp(min=0)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the starts of documents in the flattened rows, and their lengths, on the host. Waits for the
        device."""
        if self.tree_ends is not None:
            raise UnsupportedModelError(
                "a part of this model runs on each document by itself, but the documents of a tree share tokens. Leave "
                "tree_ends and share_prefixes out, and pass each sequence as a document."
            )
        flat = self.runs()[0].flatten()
        begin = flat.nonzero().flatten()
        length = torch.diff(begin, append=begin.new_tensor([flat.shape[0]]))
        keep = self.not_padding().flatten()[begin]
        return begin[keep].cpu(), length[keep].cpu()

    def boundary_arguments(self) -> dict[str, Tensor]:
        """Return the starts of documents in the flattened rows, as arguments of transformers' layers for their kernels.

        Waits for the device, once for all layers.
        """
        if not self.kept_boundaries:
            assert self.tree_ends is None
            starts = self.runs()[0].flatten()
            offsets = torch.cat([starts.nonzero().flatten(), starts.new_tensor([starts.shape[0]], dtype=torch.long)])
            offsets = offsets.to(torch.int32)
            numbers = (starts.cumsum(0) - 1)[None].to(torch.int32)
            self.kept_boundaries.update(seq_idx=numbers, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
        return self.kept_boundaries

    def run_on_documents(self, layer: Any, arguments: dict[str, Any]) -> Any:
        """Run a layer that needs all tokens of each document."""
        return layer.run(arguments, self)

    def places(self) -> Tensor:
        """Return (B, T) int64, each token's position in its document, for models that count positions along the row.

        In a row with one document that continues a cache, padding is counted, because the model counts it later.
        """
        positions = self.positions()
        if not self.cached:
            return positions
        starts, live = self.runs()
        documents = (starts if live is None else starts & live).sum(1, keepdim=True)
        return torch.where(documents > 1, positions, self._rows(0))

    def _cached(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> BlockDiagonalMask:
        """Make the mask of queries that continue a cache. A token at position p follows p tokens of its own
        document."""
        if self.boundaries is not None or self.tree_ends is not None:
            raise ValueError(
                "cu_seq_lens_q, seq_idx and tree_ends describe a batch of whole documents, but the cache already "
                "holds tokens. To continue a cache pass position_ids alone, or leave the cache out."
            )
        begin = torch.zeros((self.tokens[0], 1), dtype=torch.long, device=self.device)
        if self.attention_mask is not None:
            begin = first_tokens(self.attention_mask)[:, None]
        rows = self._rows(query_offset)  # counted with the cache
        begin = begin.expand_as(rows)
        if self.position_ids is not None:
            starts = document_starts(self.position_ids).expand(self.tokens).clone()
            starts[:, 0] = False  # the first token continues a document: its position is the number of cached tokens
            positions = self.position_ids[0] if self.position_ids.ndim == 3 else self.position_ids
            first = rows[:, :1] - positions.expand(self.tokens)[:, :1]
            inner = torch.where(starts, rows, -1).cummax(1).values
            begin = torch.maximum(begin, torch.where(inner < 0, first, inner))
        end = torch.full_like(rows, num_keys + key_offset)
        if spec.overlay is not None:
            start, stop = overlay_intervals(spec.overlay, rows, begin, end, num_keys + key_offset)
        else:
            start, stop = visible_keys(rows, begin, end, spec.reach)
        stop = (stop - key_offset).clamp(0, num_keys)
        start = torch.minimum((start - key_offset).clamp(0, num_keys), stop)
        start, stop = ((self._base(num_keys) + bound).flatten().to(torch.int32) for bound in (start, stop))
        return BlockDiagonalMask(start, stop, self.tokens[0] * num_keys, trusted=True)

    def _rows(self, offset: int | Tensor) -> Tensor:
        return (torch.arange(self.tokens[1], device=self.device) + offset).expand(self.tokens)

    def _base(self, num_keys: int) -> Tensor:
        return torch.arange(self.tokens[0], device=self.device)[:, None] * num_keys


def as_addend(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to be added to scores, from a bool mask of the visible keys."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def first_tokens(attention_mask: Tensor) -> Tensor:
    """Return (B,), the first token of each row that isn't padding. Refuse padding between tokens, and numbers of
    several documents."""
    live = attention_mask != 0
    require(
        ((changes(attention_mask) & live).sum(1) <= 1).all(),
        "attention_mask has padding between cached tokens and new ones, or numbers several documents of a row. Pad on "
        "the left for generation, and on the right if the cache holds virtual tokens (PEFT's). Mark documents that "
        "continue a cache by position_ids alone.",
    )
    return live.int().argmax(1)


def excerpt(wrong: Tensor, ids: Tensor, starts: Tensor) -> str:
    """Describe the first place where a check failed, for messages; empty if reading it would wait for the device."""
    if wrong.device.type != "cpu" or not bool(wrong.any()):
        return ""
    row, column = (int(x) for x in wrong.nonzero()[0])
    around = slice(max(column - 3, 0), column + 4)
    return (
        f" (row {row}, token {column}: {ids[row, around].tolist()} around it, where a document begins at "
        f"{starts[row, around].int().tolist()})"
    )

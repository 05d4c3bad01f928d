"""The documents of a forward pass, and the interval masks of its layers.

A `PackedBatch` takes the place of the model's `attention_mask` argument. transformers passes it unchanged to the
registered mask function, once for each kind of mask. Every layer gets the result as `attention_mask`. So the packing
travels with the call, and no state outlives it.
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
from tritonpack.masks.block_diagonal import (
    BlockDiagonalMask,
    changes,
    document_starts,
    mask_from_intervals,
    tree_mask,
)
from tritonpack.masks.intervals import from_runs, visible_keys
from tritonpack.ops import autocast, run_attention
from tritonpack.options import AttentionOptions, make_options
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskFunction, MaskSpec, overlay_intervals
from tritonpack.patches.tensor_like import TensorLike

ATTENTIONS = ("tritonpack", "sdpa", "eager")


@dataclass(frozen=True)
class Serving:
    """Which attention implementation runs.

    Attributes:
        attention: "tritonpack" for the kernels, which take intervals; "sdpa" or "eager" for transformers' own
            attention, or "dense" for layers outside of its interface, which take dense masks.
        backend: of the kernels.
        require_in_force: raises after the model was unpatched.
        checked: the options and the backend for shapes, dtypes and devices of q, k and v that passed the checks. Layers
            and calls are alike, so there are few.
    """

    attention: str
    backend: Backend
    require_in_force: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    checked: dict[Any, tuple[AttentionOptions, str]] = field(default_factory=dict, compare=False, repr=False)


class IntervalMask(TensorLike):
    """A `BlockDiagonalMask` in the place of a 4D mask. A model that computes with it gets a bool tensor.

    Attributes:
        mask: the mask of all queries and keys, row after row.
        shape: (batch_size, 1, num_queries, num_keys).
        packed_batch: the packing of the tokens; None if the keys are others, such as those of a cache.
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
        self._moved: BlockDiagonalMask | None = None  # to the device of the last layer that lies elsewhere

    def for_keys(self, num_keys: int) -> IntervalMask:
        """This mask, or the mask of one new token that sees `num_keys` keys of a row.

        transformers asks the cache of one layer how many keys there are. In hybrid models that may be a recurrent
        layer, which holds none. The right number is the width of the mask for padding (`PackedBatch.interval_mask`),
        or, without such a mask, the number of keys of the attention layer.
        """
        if self.packed_batch is None or self.shape[2] != 1 or num_keys == self.shape[3]:
            return self
        return self.packed_batch.interval_mask(num_keys, num_keys - 1, 0, self.spec)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float, sinks: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """q (B * T, H, D), k (B * K, H_kv, D) and v (B * K, H_kv, D_v) -> (B * T, H, D_v), as `varlen_attention`."""
        if sinks is not None or dropout_p or torch.compiler.is_compiling():
            mask = self.mask if self.device == q.device else self.mask.to(q.device)
            if self.packed_batch is not None and self.packed_batch.recomputed:
                mask = replace(mask, trusted=True)  # which keeps what is computed of it for this layer alone
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
        """(B, 1, T, K) bool, or additive of another dtype; written once for all layers."""
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
        """The mask to be added to scores of this dtype; bool for other dtypes."""
        return self.to_tensor(dtype, additive=True) if dtype.is_floating_point else self.to_tensor()

    def to_tensor(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        """The mask as (B, 1, T, K). Padding sees itself if it is among the keys, because a softmax over nothing has no
        value. No document sees what padding computes."""
        self.serving.require_in_force()  # recomputed layers of an unpatched model get this mask, too
        if dtype == torch.float64:
            return self.to_tensor(torch.float32, additive=additive).double()
        batch, _, queries, keys = self.shape
        if self.mask.is_tree:
            places = torch.arange(batch * keys, device=self.device).view(batch, keys)
            seen = torch.stack([self.mask.restrict(row, row).to_dense() for row in places])[:, None]
            seen |= torch.eye(keys, dtype=torch.bool, device=self.device) & ~seen.any(-1, keepdim=True)
            return added(seen, dtype) if additive else seen.to(dtype)
        base = torch.arange(batch, device=self.device, dtype=torch.int32)[:, None] * keys
        start, stop = (x.view(batch, queries) - base for x in (self.mask.key_start, self.mask.key_stop))
        if queries == keys:
            own = torch.arange(keys, device=self.device, dtype=torch.int32)
            start, stop = torch.where(start < stop, start, own), torch.where(start < stop, stop, own + 1)
        # One row for each query. Its keys are those of its own row of the batch.
        rows = BlockDiagonalMask(start.flatten(), stop.flatten(), keys, trusted=True)
        return rows.to_dense(dtype, additive=additive).unflatten(0, (batch, 1, queries))


class PackedBatch(TensorLike):
    """The documents of one forward pass, in the place of a 2D padding mask.

    Attributes:
        attention_mask: (B, keys) int, 0 for padding, or None. Other numbers tell documents apart.
        position_ids: (B, T), (3, B, T) or (4, B, T) integers, or None for consecutive positions.
        boundaries: (B, T) bool, True where a document begins, if offsets or numbers say so; else None.
        tokens: (B, T), the shape of the tokens.
        by_document: whether layers that mix along the row run on each document by itself.
        cached: whether the call passes a cache, empty or not.
        filler: (B, T) bool, which tokens are the padding token, if no mask says what is padding; else None.
        tree_ends: (B, T) integers, where the subtree of each token ends, counted from the begin of its row, if the rows
            hold trees; else None. It may lie in host memory, where masks of trees are made in less time.
        row: a `Row`, where the tokens of the user's batch lie in this one row, if it was made of them; else None.
        causal: whether a causal mask of pairs of tokens told the documents, so that no layer may see later tokens.
        shared: whether it is one rank's part of a batch.
        tells_documents: whether anything in the call can tell several documents of a row apart.
        counted: whether the patch counted the positions of the call.
        compacted: whether `unpad` has made a row of it, or has left it as it is.
        recomputed: whether layers of a graph run again in backward. Such a layer can't keep anything for the next one.
    """

    arguments: tuple[str, ...] = (
        "attention_mask", "position_ids", "boundaries", "tokens", "device", "serving", "by_document", "cached",
        "filler", "tree_ends", "row", "causal", "counted",
    )  # fmt: skip
    dtype, ndim = torch.int64, 2

    by_document = cached = causal = counted = shared = recomputed = compacted = False
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
        self.tells_documents = not (attention_mask is position_ids is boundaries is self.tree_ends is None)
        self.kept_batches: list[Any] = []  # by `batches_of`
        self._kept_runs: tuple[Tensor, Tensor | None] | None = None
        self.kept_boundaries: dict[str, Tensor] = {}

    def to(self, *_: Any, **__: Any) -> PackedBatch:
        return self

    def to_tensor(self) -> Tensor:
        """(B, keys) int64, 1 for tokens and 0 for padding, as a tokenizer's mask."""
        return self.not_padding().long()

    def not_padding(self) -> Tensor:
        """(B, keys) bool: which tokens are not padding.

        A mask says so. Without one, only the tokens show that a collator has filled a row up: documents at the end of a
        row that hold nothing but the padding token are padding. The first document of a row never is.
        """
        if self.attention_mask is not None:
            return self.attention_mask != 0
        if self.tree_ends is not None:
            places = torch.arange(self.tokens[1], device=self.tree_ends.device)
            return (self.tree_ends > places).to(self.device)
        if self.filler is None or not self.tells_documents:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        tail = (~self.filler).flip(1).cumsum(1).flip(1) == 0  # only padding tokens from here on
        begins = self.runs()[0] & tail
        begins[:, 0] = False
        return begins.cumsum(1) == 0

    def long(self) -> PackedBatch:
        return self

    def cumsum(self, dim: int = -1, **options: Any) -> Tensor:
        """The number of each token in its document from 1, and 0 for padding: models count tokens so by their mask."""
        if self.shape != self.tokens or dim not in (-1, 1):
            return self.to_tensor().cumsum(dim, **options)
        return (self.positions() + 1) * self.to_tensor()

    def interval_mask(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> IntervalMask:
        """The mask of a layer that attends to `num_keys` keys per row, built once for all layers of one kind.

        Args:
            query_offset: how many tokens of each row the cache holds; a tensor for caches of fixed size.
            key_offset: how many of these tokens the layer's cache has dropped.
        """
        if self.causal and spec.overlay is None and spec.reach.right != 0:
            raise ValueError(
                "attention_mask is a causal mask of pairs, and layers of this model see both directions. Mark "
                "documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask that numbers them."
            )
        columns = self.shape[1]
        if isinstance(query_offset, int) and query_offset == 0 and num_keys == self.tokens[1] < columns:
            num_keys, query_offset = columns, columns - num_keys  # see `IntervalMask.for_keys`
        fresh = isinstance(query_offset, int) and query_offset == 0 and key_offset == 0 and num_keys == self.tokens[1]
        key = (num_keys, key_offset, spec)
        for known, interval_mask in self.kept:  # a list, because a graph that hashes a size fits only this size
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
        if not torch.compiler.is_compiling():  # a graph can't change what came into it
            self.kept.append((key, interval_mask))
        return interval_mask

    def document_mask(self) -> IntervalMask:
        """The mask with which every token sees its whole document."""
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
                "in a tree each token sees the tokens before it, and a layer of this model "
                + ("composes a mask of its own" if spec.overlay is not None else "also sees the tokens after it")
                + ". Give it sequences without common beginnings: without tree_ends, and without share_prefixes."
            )
        mask = tree_mask(ends, "ends", spec.reach)
        return mask if mask.device == self.device else mask.to(self.device)

    def runs(self) -> tuple[Tensor, Tensor | None]:
        """(B, T) bool: where documents and runs of padding begin, and which tokens are not padding (None: all)."""
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
            torn = pieces & ~begins & live & (ids <= pad(ids.cummax(1).values[:, :-1], (1, 0)))
            require(
                ~torn.any(),
                lambda: (
                    f"attention_mask has padding inside a document{shown(torn, ids, begins)}. Padding may lie before, "
                    "between and after documents; number documents in ascending order, or let position_ids restart "
                    "where one begins. If virtual tokens (PEFT's) stand before each row, pad on the right."
                ),
            )
            starts = begins | pieces
        self._kept_runs = starts, live
        return self._kept_runs

    def positions(self) -> Tensor:
        """(B, T) int64, each token's place within its document, counted from 0; in a tree its depth."""
        if self.tree_ends is not None:
            depth = self.interval_mask(self.tokens[1], 0, 0, CAUSAL).mask.diagonal
            assert depth is not None
            return depth.view(self.tokens).long()
        starts, _ = self.runs()
        rows = torch.arange(self.tokens[1], device=self.device)
        return rows - torch.where(starts, rows, 0).cummax(1).values

    def continued_positions(self) -> Tensor:
        """(B, T) int64, each token's place in its document, where the mask may cover tokens of a cache, too."""
        assert self.attention_mask is not None
        if self.shape == self.tokens:
            return self.positions()
        places = torch.arange(self.shape[1], device=self.device) - first_tokens(self.attention_mask)[:, None]
        return places[:, -self.tokens[1] :].clamp(min=0)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Where documents begin in the flattened rows, and their lengths, both on the host. Waits for the device."""
        if self.tree_ends is not None:
            raise UnsupportedModelError(
                "a part of this model runs on each document by itself, and the documents of a tree share tokens. Give "
                "it sequences without common beginnings: without tree_ends, and without share_prefixes."
            )
        flat = self.runs()[0].flatten()
        begin = flat.nonzero().flatten()
        length = torch.diff(begin, append=begin.new_tensor([flat.shape[0]]))
        keep = self.not_padding().flatten()[begin]
        return begin[keep].cpu(), length[keep].cpu()

    def boundary_arguments(self) -> dict[str, Tensor]:
        """Where documents begin in the flattened rows, as transformers' layers pass it to their kernels.

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
        """The result of a layer that needs all tokens of each document."""
        return layer.run(arguments, self)

    def places(self) -> Tensor:
        """(B, T) int64, each token's place in its document, for models that count the places of a row.

        A row that holds one document and continues from a cache counts its padding, as the model does later.
        """
        positions = self.positions()
        if not self.cached:
            return positions
        starts, live = self.runs()
        documents = (starts if live is None else starts & live).sum(1, keepdim=True)
        return torch.where(documents > 1, positions, self._rows(0))

    def _cached(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> BlockDiagonalMask:
        """The mask of queries that continue a cache: a token at position p follows p tokens of its own document."""
        if self.boundaries is not None or self.tree_ends is not None:
            raise ValueError(
                "cu_seq_lens_q, seq_idx and tree_ends describe a batch of whole documents, but the cache already "
                "holds tokens. Pass position_ids alone when continuing from a cache, or leave the cache out."
            )
        begin = torch.zeros((self.tokens[0], 1), dtype=torch.long, device=self.device)
        if self.attention_mask is not None:
            begin = first_tokens(self.attention_mask)[:, None]
        rows = self._rows(query_offset)  # counted with the cache
        begin = begin.expand_as(rows)
        if self.position_ids is not None:
            starts = document_starts(self.position_ids).expand(self.tokens).clone()
            starts[:, 0] = False  # the first token continues, by as many tokens as its position says
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


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask to be added to scores, of one that says which keys are seen."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def first_tokens(attention_mask: Tensor) -> Tensor:
    """(B,) the first token of each row that is not padding. Padding between tokens, and numbers of several documents,
    are refused."""
    live = attention_mask != 0
    require(
        ((changes(attention_mask) & live).sum(1) <= 1).all(),
        "attention_mask has padding between the tokens that the cache holds and new ones, or numbers several documents "
        "of a row. Pad on the left when generating, and on the right if the cache holds virtual tokens (PEFT's). "
        "Documents that continue from a cache are told apart by position_ids alone.",
    )
    return live.int().argmax(1)


def shown(wrong: Tensor, ids: Tensor, starts: Tensor) -> str:
    """The first place where a check failed and the numbers around it, for messages; empty if reading it would wait."""
    if wrong.device.type != "cpu" or not bool(wrong.any()):
        return ""
    row, column = (int(x) for x in wrong.nonzero()[0])
    around = slice(max(column - 3, 0), column + 4)
    return (
        f" (row {row}, token {column}: {ids[row, around].tolist()} around it, where a document begins at "
        f"{starts[row, around].int().tolist()})"
    )

"""One rank's rows of a packed batch, and the masks of its layers, which cover the keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from tritonpack.errors import UnsupportedModelError
from tritonpack.ops import autocast
from tritonpack.parallel.attention import check_call, run_shared
from tritonpack.parallel.shard_and_gather import Sharding, outside_of_graphs
from tritonpack.parallel.whole_documents import WholeDocuments
from tritonpack.patches.mask_spec import MaskSpec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch

MIN_ROWS = 2  # per rank: with two, every layout gives each rank rows, and a model can't run without rows


class ShardedMask(IntervalMask):
    """The mask of the whole batch, for layers that get one rank's queries and keys."""

    @outside_of_graphs
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float, sinks: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert isinstance(self.packed_batch, ShardedBatch)
        self.packed_batch.attended = True
        sharding, backend = self.packed_batch.sharding, self.serving.backend
        whole = sharding.dimensions, self.mask, sharding.layout
        q, k, v = autocast(q, k, v)
        form = (
            q.shape[1:], k.shape[1:], v.shape[1:], q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, scale,
            softcap, backend,
        )  # fmt: skip
        checked = sharding.dimensions.checked.get(form)
        alike = q.shape[0] == k.shape[0] == v.shape[0] == self.shape[2]
        if checked is None or not alike or sinks is not None or dropout_p:
            checked = check_call(*whole, q, k, v, backend, dropout_p, scale=scale, softcap=softcap, sinks=sinks)
            if sinks is None:
                sharding.dimensions.checked[form] = checked
        return run_shared(*whole, q, k, v, *checked)

    def to_tensor(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        raise UnsupportedModelError(
            "a layer of this model computes with the mask itself (attention outside of transformers' interface, biases "
            "or an indexer of its own), so it needs the keys of all ranks. Train it without SequenceParallel."
        )


class ShardedBatch(PackedBatch):
    """One rank's rows of a packed batch, as a batch of one row.

    Attributes:
        whole: the whole batch, with the padding of `sharding`.
        sharding: how the whole batch is divided.
        attended: whether a layer has exchanged keys and values, or rows of documents.
    """

    shared = True
    arguments = (*PackedBatch.arguments, "whole", "sharding")

    def __init__(self, *, whole: PackedBatch, sharding: Sharding, **named: Any) -> None:
        super().__init__(**named)
        self.whole, self.sharding = whole, sharding
        self.attended = False
        self._documents: WholeDocuments | None = None

    @outside_of_graphs
    def interval_mask(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> IntervalMask:
        if spec.overlay is not None:
            raise UnsupportedModelError(
                "this model composes a mask of its own (for images or prefixes) from the tokens of its call, and each "
                "rank has only some of them. Train it without SequenceParallel."
            )
        for known, mask in self.kept:
            if known == (spec,):
                return mask
        whole = self.whole.interval_mask(self.whole.tokens[1], 0, 0, spec).mask
        shape = torch.Size((1, 1, self.tokens[1], self.tokens[1]))
        mask = ShardedMask(whole, shape, self.serving, self, spec)
        self.kept.append(((spec,), mask))
        return mask

    def forget(self) -> None:
        """Drop the masks after a forward pass. Batch and masks refer to each other, which would delay freeing them.

        Layers that are recomputed in backward hold their own masks.
        """
        self.kept.clear()
        self.whole.kept.clear()

    def runs(self) -> tuple[Tensor, Tensor | None]:
        starts, live = self.whole.runs()
        return self.sharding.take(starts), None if live is None else self.sharding.take(live)

    def positions(self) -> Tensor:
        return self.sharding.take(self.whole.positions())

    def places(self) -> Tensor:
        return self.sharding.take(self.whole.places())

    @outside_of_graphs
    def run_on_documents(self, layer: Any, arguments: dict[str, Any]) -> Any:
        self.attended = True
        if self._documents is None:
            self._documents = WholeDocuments(self.whole, self.sharding.layout, self.sharding.dimensions.ranks)
        documents = self._documents
        return tree_map(documents.give_back, layer.run(tree_map(documents.fetch, arguments), documents.packed_batch))

    def lengths(self) -> tuple[Tensor, Tensor]:
        raise UnsupportedModelError(
            "a part of this model runs on each document by itself, and each rank has only parts of them. Train it "
            "without SequenceParallel."
        )


def shard_batch(whole: PackedBatch, specs: Sequence[MaskSpec], context: Any) -> ShardedBatch:
    """This rank's rows of a batch in a `SequenceParallel`. The layout counts the work of layers with these `specs`."""
    tokens = whole.tokens
    columns = max(-(-MIN_ROWS * context.ranks.size // tokens[0]) - tokens[1], 0)
    if columns:
        whole = _pad_rows(whole, columns)
    masks = []
    for spec in specs:
        masks.append(whole.interval_mask(whole.tokens[1], 0, 0, spec).mask)
    layout = context.dimensions.make_layout(context.layout, masks)
    sharding = Sharding(context.dimensions, layout, tokens, columns)
    mask = whole.attention_mask
    # (B, T), (1, T) for all rows alike, or (3, B, T) for several kinds of positions
    positions = whole.positions() if whole.position_ids is None else whole.position_ids
    positions = positions.expand(*positions.shape[:-2], *whole.tokens)
    return ShardedBatch(
        attention_mask=None if mask is None else sharding.take(mask),
        position_ids=sharding.take(positions, positions.ndim - 2),
        boundaries=None,
        tokens=torch.Size((1, sharding.rows)),
        device=whole.device,
        serving=whole.serving,
        by_document=True,
        whole=whole,
        sharding=sharding,
    )


def _pad_rows(packed_batch: PackedBatch, columns: int) -> PackedBatch:
    """A batch with `columns` tokens of padding at the end of each row: one more document, which no token sees."""
    starts, _ = packed_batch.runs()
    positions = packed_batch.positions() if packed_batch.position_ids is None else packed_batch.position_ids
    return packed_batch.replace(
        attention_mask=pad(packed_batch.to_tensor(), [0, columns]),
        position_ids=pad(positions, [0, columns]),
        boundaries=pad(starts, [0, columns]),
        tokens=torch.Size((packed_batch.tokens[0], packed_batch.tokens[1] + columns)),
        filler=None,
    )

"""What a patched model's layers get in the place of masks when a batch is spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.sharding import Sharding
from tritonpack.patches.mask_spec import MaskSpec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch


class ShardedMask(IntervalMask):
    """The mask of the whole batch, for layers that have one rank's rows of it: queries (1, rows), keys likewise.

    Attributes:
        sharding: who has which rows.
    """

    arguments = (*IntervalMask.arguments, "sharding")

    def __init__(self, *given: Any, sharding: Sharding, **named: Any) -> None:
        super().__init__(*given, **named)
        self.sharding = sharding

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert isinstance(self.packed_batch, ShardedBatch)
        self.count_use()
        self.packed_batch.attended.add(self.spec)
        return self.sharding.attend(q, k, v, self.mask, backend=self.serving.backend, **options)

    def to_tensor(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        raise UnsupportedModelError(
            "a layer of this model computes with the mask itself (attention outside of transformers' interface, biases "
            "or an indexer of its own), which would need the keys of all ranks; sequence parallelism can't do that."
        )


class ShardedBatch(PackedBatch):
    """One rank's rows of a packed batch, as a batch of one row; masks are of the whole.

    Attributes:
        whole: the packing of the batch.
        filled: the same, filled up as the layout has it; masks are made of it.
        sharding: who has which rows.
        attended: the kinds of layers that have exchanged keys and values.
    """

    shared = True
    arguments = (*PackedBatch.arguments, "whole", "filled", "sharding")

    def __init__(self, *, whole: PackedBatch, filled: PackedBatch, sharding: Sharding, **named: Any) -> None:
        super().__init__(**named)
        self.whole, self.filled, self.sharding = whole, filled, sharding
        self.attended: set[MaskSpec] = set()

    def interval_mask(self, num_keys: int, query_offset: int | Tensor, key_offset: int, spec: MaskSpec) -> IntervalMask:
        if spec.overlay is not None:
            raise UnsupportedModelError(
                "this model composes a mask of its own (images that see all of themselves, prefixes) from the tokens "
                "that it is given, which are one rank's; sequence parallelism can't do that."
            )
        for known, interval_mask in self.kept:
            if known == (spec,):
                return interval_mask
        whole = self.filled.interval_mask(self.filled.tokens[1], 0, 0, spec).mask
        shape = torch.Size((1, 1, self.tokens[1], self.tokens[1]))
        mask = ShardedMask(whole, shape, self.serving, self, spec, sharding=self.sharding)
        self.kept.append(((spec,), mask))
        return mask

    def forget(self) -> None:
        """Let go of the masks once a forward is done: they know us, too, and would stay until all garbage is collected.

        What is recomputed in backward has been given its masks.
        """
        for packed_batch in (self, self.whole, self.filled):
            packed_batch.kept.clear()

    def runs(self) -> tuple[Tensor, Tensor | None]:
        starts, live = self.whole.runs()
        return self.sharding.shard(starts), None if live is None else self.sharding.shard(live)

    def positions(self) -> Tensor:
        return self.sharding.shard(self.whole.positions())

    def places(self) -> Tensor:
        return self.sharding.shard(self.whole.places())

    def lengths(self) -> tuple[Tensor, Tensor]:
        raise UnsupportedModelError("layers that mix along the row need whole documents, and ranks have parts of them.")


def fill_up(packed_batch: PackedBatch, columns: int) -> PackedBatch:
    """A packing with so many tokens of padding at the end of each row: one more document, that nobody sees."""
    if not columns:
        return packed_batch
    starts, live = packed_batch.runs()
    live = torch.ones_like(starts) if live is None else live
    positions = packed_batch.positions() if packed_batch.position_ids is None else packed_batch.position_ids
    boundaries = pad(starts, [0, columns])
    boundaries[:, -columns] = True
    return packed_batch.replace(
        attention_mask=pad(live.int(), [0, columns]),
        position_ids=pad(positions, [0, columns]),
        boundaries=boundaries,
        tokens=torch.Size((packed_batch.tokens[0], packed_batch.tokens[1] + columns)),
    )


def shard_batch(whole: PackedBatch, filled: PackedBatch, sharding: Sharding) -> ShardedBatch:
    """This rank's rows of a packing without a cache."""
    assert not whole.cached
    mask = whole.to_tensor() if sharding.columns and whole.attention_mask is None else whole.attention_mask
    positions = whole.positions() if whole.position_ids is None else whole.position_ids  # a shard can't count its own
    return ShardedBatch(
        attention_mask=None if mask is None else sharding.shard(mask),
        position_ids=shard_positions(positions, sharding),
        boundaries=None,
        tokens=torch.Size((1, sharding.rows)),
        where=whole.where,
        serving=whole.serving,
        whole=whole,
        filled=filled,
        sharding=sharding,
    )


def shard_positions(position_ids: Tensor, sharding: Sharding) -> Tensor:
    """(B, T) or (1, T) for all rows alike, or several kinds of them, (3, B, T) -> (1, rows) or (3, 1, rows)."""
    whole = position_ids.expand(*position_ids.shape[:-2], *sharding.tokens)
    return sharding.shard(whole, whole.ndim - 2)

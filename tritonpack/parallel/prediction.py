"""What one exchange with one layout is predicted to take: the model behind `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel import timing, traffic
from tritonpack.parallel.exchange import Exchange
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.shape import AttentionShape
from tritonpack.parallel.tiles import PAIRS_PER_BLOCK, Integers, Tiles, cut

BACKWARD = 2.5  # times forward's work: five matrix products in place of two


@dataclass(frozen=True)
class Prediction:
    """What a training step's attention takes with an exchange and a layout: forward and backward, all layers.

    Attributes:
        exchange, layout: as `attend` and `make_layout` name them.
        attention: seconds that the slowest rank computes.
        exposed: seconds that ranks wait besides, for what is sent or for each other.
        received_forward: (ranks,) bytes that each rank receives in forward.
        received_backward: (ranks,) the same in backward; with checkpointing forward's again besides.
        memory: bytes that the exchange holds at its peak, on the rank with most: an estimate.
        imbalance: of the visible pairs (times heads) that ranks compute, most over mean; 1.0 is balance.
    """

    exchange: Exchange
    layout: LayoutName
    attention: float
    exposed: float
    received_forward: tuple[int, ...] = field(repr=False)
    received_backward: tuple[int, ...] = field(repr=False)
    memory: int
    imbalance: float

    @property
    def seconds(self) -> float:
        return self.attention + self.exposed

    @property
    def received(self) -> int:
        """Bytes, of the rank that receives most."""
        return max(map(sum, zip(self.received_forward, self.received_backward, strict=True)))


@dataclass(frozen=True, eq=False)
class Kind:
    """Layers that see the same mask.

    Attributes:
        mask: in host memory.
        layers: how many see it.
        tiles: of the batch undivided.
    """

    mask: BlockDiagonalMask
    layers: int
    tiles: Tiles

    @classmethod
    def of(cls, mask: BlockDiagonalMask, layers: int) -> Kind:
        return cls(mask, layers, cut(mask.key_start.numpy(), mask.key_stop.numpy(), [mask.num_queries]))


@dataclass(frozen=True, eq=False)
class Shards:
    """A batch divided among ranks.

    Attributes:
        layout: its name.
        rows: of each rank.
        lengths: how many they are.
        in_order: whether the shards laid end to end are the batch.
        tiles: of each kind of layers.
    """

    layout: LayoutName
    rows: Sequence[Tensor]
    lengths: list[int]
    in_order: bool
    tiles: list[Tiles]

    @classmethod
    def of(cls, layout: LayoutName, rows: Sequence[Tensor], kinds: Sequence[Kind]) -> Shards:
        order, lengths = np.concatenate([own.numpy() for own in rows]), [len(own) for own in rows]
        tiles = [cut(kind.mask.key_start.numpy()[order], kind.mask.key_stop.numpy()[order], lengths) for kind in kinds]
        return cls(layout, rows, lengths, bool((order[1:] > order[:-1]).all()), tiles)


@dataclass(frozen=True)
class Model:
    """What predictions follow from beside the batch.

    Attributes:
        shape: of the model's attention.
        bandwidth: bytes per second that a rank receives.
        flops: floating-point operations per second that attention attains on a rank.
        latency: seconds per message.
        stride: key heads per step of "all_gather".
        checkpointing: whether backward runs forward again.
    """

    shape: AttentionShape
    bandwidth: float
    flops: float
    latency: float
    stride: int
    checkpointing: bool

    def predict(self, exchange: Exchange, shards: Shards, kinds: Sequence[Kind]) -> Prediction:
        """For all layers; the exchange must be able to compute them."""
        forward, backward = traffic.received(exchange, shards.lengths, self.shape)
        again = int(self.checkpointing)
        attention = seconds = 0.0
        pairs: Integers = np.zeros(len(shards.rows), np.int64)
        for kind, tiles in zip(kinds, shards.tiles, strict=True):
            blocks = self._blocks(exchange, shards, kind, tiles)
            work, there, back = self._layer(exchange, blocks, int(forward.max()), int(backward.max()))
            attention += kind.layers * (1 + again + BACKWARD) * work
            seconds += kind.layers * ((1 + again) * there + back)
            pairs = pairs + kind.layers * tiles.pairs
        if exchange == "ulysses":
            pairs = traffic.head_shares(self.shape, len(shards.rows))[0]
        layers = sum(kind.layers for kind in kinds)
        return Prediction(
            exchange,
            shards.layout,
            attention,
            max(seconds - attention, 0.0),  # which rounding could make negative
            tuple((layers * forward).tolist()),
            tuple((layers * (backward + again * forward)).tolist()),
            traffic.held(exchange, shards.lengths, self.shape, self.stride, shards.in_order),
            float(pairs.max() * len(pairs) / pairs.sum()) if pairs.any() else 1.0,
        )

    def _blocks(self, exchange: Exchange, shards: Shards, kind: Kind, tiles: Tiles) -> Integers:
        """(ranks, steps): the blocks that each rank visits, times heads; steps are sources of keys in "ring"."""
        if exchange == "ulysses":
            return kind.tiles.blocks() * traffic.head_shares(self.shape, len(shards.rows))[0][:, None]
        blocks = tiles.blocks()[:, None]
        if exchange == "ring":
            blocks = tiles.blocks_by_source([own.numpy() for own in shards.rows])
        return blocks * self.shape.heads

    def _layer(self, exchange: Exchange, blocks: Integers, forward: int, backward: int) -> tuple[float, float, float]:
        """Seconds of one layer: the slowest rank's work in forward; forward and backward with `so many` bytes."""
        ranks, kv_heads = len(blocks), self.shape.kv_heads
        block = PAIRS_PER_BLOCK * 2 * (self.shape.dim + self.shape.dim_v) / self.flops
        work = int(blocks.sum(1).max()) * block
        latency = self.latency if ranks > 1 else 0.0
        there, back = forward / self.bandwidth, backward / self.bandwidth
        if exchange == "ulysses":
            # All heads arrive before they are computed and leave after it: two messages, and nothing overlaps.
            return work, there + work + 2 * latency, back + BACKWARD * work + 2 * latency
        gradients = back - there  # keys travel in backward, too
        if exchange == "ring":
            keys, gradients = latency + there / max(ranks - 1, 1), latency + gradients / ranks
            seconds = block * blocks.astype(np.float64)
            return work, timing.ring(seconds, keys, 0.0), timing.ring(BACKWARD * seconds, keys, gradients)
        shares = [min(self.stride, kv_heads - first) / kv_heads for first in range(0, kv_heads, self.stride)]
        gathers, scatters = ([latency + share * sent for share in shares] for sent in (there, gradients))
        return (
            work,
            timing.all_gather(work, shares, gathers, [0.0] * len(shares)),
            timing.all_gather(BACKWARD * work, shares, gathers, scatters),
        )

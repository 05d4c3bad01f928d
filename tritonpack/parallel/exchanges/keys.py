"""Parts of the keys that a rank attends to, and how the keys of "all_gather", "group_cast" and "auto" travel.

- all-gather: every rank receives the keys and values of all ranks, in shards that are padded to the length of the
  longest. A reduce-scatter returns their gradients.
- group cast: every rank receives the keys and values that its queries see, in all-to-all messages of unequal sizes.
  Gradients return the same way, and are added in the order of ranks. Source: MagiAttention (SandAI, 2025).
- auto: group cast if no rank sees more keys of others than the longest shard has rows, else all-gather.

Gradients travel in float32 for half precision. The rule of "auto" is never worse than an all-gather, into a rank or
into a node, whichever ranks are a node. For R ranks, nodes of G ranks and a longest shard of N rows:

- forward: a node receives at most G N keys by group cast, and (R - G) N or more by all-gather.
- backward: the R - G other ranks send a node at most N gradients each by group cast. By a reduce-scatter, which sums
  within nodes first, each of R / G - 1 other nodes sends G N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks, all_to_all, gather, pad_to, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call, join, rows_mask, split
from tritonpack.parallel.layouts import Layout

Keys = Callable[[], tuple[Tensor, Tensor]]  # waits for keys and values
Addition = Callable[[Tensor, Tensor], None]  # waits for gradients and adds them to dk and dv of the own rows


@dataclass(frozen=True, eq=False)
class OwnKeys:
    """A run of the own rows, which don't travel.

    Attributes:
        mask: between the queries and these keys.
    """

    mask: BlockDiagonalMask
    rows: slice

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        """Start to send k (n, heads, D) and v (n, heads, D_v) of the own rows; the result has the part's."""
        return lambda: (k[self.rows], v[self.rows])

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        """Start to send gradients of the part's keys and values to the ranks that own them.

        The result adds what arrives at this rank to dk (n, heads, D) and dv (n, heads, D_v), in `comm.wide`.
        """

        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            total_dk[self.rows] += dk
            total_dv[self.rows] += dv

        return add


def own_keys(call: Call) -> OwnKeys:
    """All own keys."""
    return OwnKeys(rows_mask(call.mask, call.layout, call.ranks.rank, call.ranks.rank), slice(None))


def own_halves(call: Call) -> tuple[OwnKeys, ...]:
    """The second half of the own keys, and the first half, which more queries of a causal document see."""
    rows = call.layout.rows[call.ranks.rank]
    middle = rows.shape[0] // 2
    return call.mask.cached(
        ("own halves", call.layout, call.ranks.rank),
        lambda: tuple(
            OwnKeys(call.mask.restrict(rows, rows[run]), run) for run in (slice(middle, None), slice(middle))
        ),
    )


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """The rows of all other ranks.

    Attributes:
        length: of the longest shard, to which the others are padded.
        places: (keys,) int64, where the keys lie in the gathered shards, laid end to end, in the order of the batch.
    """

    mask: BlockDiagonalMask
    length: int
    places: Tensor

    @classmethod
    def of(cls, mask: BlockDiagonalMask, layout: Layout, rank: int) -> GatheredKeys | None:
        """Those of one rank; None if it is the only one."""
        others, length = [one for one in range(layout.ranks) if one != rank], max(layout.lengths)
        if not others or not length:
            return None
        keys, order = torch.cat([layout.rows[one] for one in others]).sort()
        places = [torch.arange(layout.lengths[one], device=keys.device) + one * length for one in others]
        return cls(mask.restrict(layout.rows[rank], keys), length, torch.cat(places)[order])

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        coming = gather(pad_to(join(k, v), 0, self.length), ranks)
        return lambda: split(coming().flatten(0, 1).index_select(0, self.places), k, v)

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        shards = _among(self.places, ranks.size * self.length, dk, dv)
        coming = scatter_sum(shards.unflatten(0, (ranks.size, self.length)), ranks)

        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            for total, arrived in zip((total_dk, total_dv), split(coming(), dk, dv), strict=True):
                total += arrived[: total.shape[0]]

        return add


@dataclass(frozen=True, eq=False)
class CastKeys:
    """The rows of other ranks that this rank's queries see.

    Attributes:
        sent: int64, the places in the own shard of the rows that each rank gets, in the order of ranks.
        sent_counts: for each rank, how many of these it gets; 0 for this rank.
        received_counts: for each rank, how many rows come from it.
        places: (keys,) int64, where the keys lie among the received rows, in the order of the batch.
    """

    mask: BlockDiagonalMask
    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    places: Tensor

    @classmethod
    def of(cls, mask: BlockDiagonalMask, layout: Layout, rank: int) -> CastKeys | None:
        """Those of one rank; None if no rank needs a row of another. Waits for the mask's device.

        Raises:
            ValueError: a mask of trees.
        """
        rows, seen = layout.rows_on_host, layout.seen_by_ranks(mask)
        if not any(layout.remote_keys(mask)):
            return None
        sent, keys = ([rows[rank][:0]] * layout.ranks for _ in range(2))
        for other in {*range(layout.ranks)} - {rank}:
            sent[other] = seen[other].among(rows[rank])
            keys[other] = rows[other][seen[rank].among(rows[other])]
        ascending, places = torch.cat(keys).sort()
        device = mask.device
        restricted = mask.restrict(layout.rows[rank], ascending.to(device))
        counts = list(map(len, sent)), list(map(len, keys))
        return cls(restricted, torch.cat(sent).to(device), *counts, places.to(device))

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        message = join(k, v).index_select(0, self.sent)
        coming = all_to_all(message, self.sent_counts, self.received_counts, ranks)
        return lambda: split(coming().index_select(0, self.places), k, v)

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        message = _among(self.places, sum(self.received_counts), dk, dv)
        coming = all_to_all(message, self.received_counts, self.sent_counts, ranks)

        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            rows = self.sent.split(self.sent_counts)
            for total, arrived in zip((total_dk, total_dv), split(coming(), dk, dv), strict=True):
                for some, part in zip(rows, arrived.split(self.sent_counts), strict=True):
                    total.index_add_(0, some, part)  # no row twice, so the order of additions is fixed

        return add


# Some of the keys that a rank attends to, in the order of the batch, so that their mask is an interval mask.
Part = OwnKeys | GatheredKeys | CastKeys


def _among(places: Tensor, rows: int, dk: Tensor, dv: Tensor) -> Tensor:
    """Gradients of keys and values as a message with them at these places among its rows."""
    gradients = join(dk, dv).to(wide(dk.dtype))
    return gradients.new_zeros(rows, gradients.shape[1]).index_copy_(0, places, gradients)


def other_keys(call: Call) -> Part | None:
    """The keys of other ranks that travel; None on all ranks if no rank needs any. "auto" waits for the device."""
    exchange, mask, layout, rank = call.exchange, call.mask, call.layout, call.ranks.rank

    def make() -> Part | None:
        casts = exchange == "group_cast"
        if exchange == "auto" and not mask.is_tree:  # all ranks find the same, because the mask and the layout are
            casts = max(layout.remote_keys(mask)) <= max(layout.lengths)
        return (CastKeys if casts else GatheredKeys).of(mask, layout, rank)

    return mask.cached((exchange, layout, rank), make)

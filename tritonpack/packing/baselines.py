"""Plans as simpler ways make them, to measure others against: padded, interleaved, rows in order, bins of the epoch.

Each takes whole documents in an order drawn from (seed, epoch), and fills the steps of all ranks from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.bins import pack
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.plan import Plan

Lengths = Sequence[int] | NDArray[Any]


def padded_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """As many documents per row as surely fit when padded to the longest of all: what training without packing does.

    The last step takes what is left over, if every rank gets a document.

    Args:
        lengths: (documents,) integers, tokens of each document, from 1 to `capacity`.
        capacity: tokens, padding included, that fit into a row.
        num_ranks: rows per step.
        seed: decides the order together with `epoch`.

    Raises:
        ValueError: bad lengths, a document that doesn't fit, a capacity or a number of ranks below 1.
    """
    return _fixed_number(lengths, capacity, num_ranks, seed, epoch, alike=False)


def interleaved_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """As `padded_rows`, each step's documents sorted by length and dealt out to the ranks one by one, unpadded.

    This is what the multipack project compares its samplers with. Arguments and errors are those of `padded_rows`.
    """
    return _fixed_number(lengths, capacity, num_ranks, seed, epoch, alike=True)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """Rows filled in order, a new one begun where a document doesn't fit; row after row goes to rank after rank.

    Rows that don't make a whole step are left out. Arguments and errors are those of `padded_rows`.
    """
    tokens, order, capacity, num_ranks = _prepare(lengths, capacity, num_ranks, seed, epoch)
    offsets = pack(tokens[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


def shuffled_bins(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """The whole epoch packed at once by best-fit-decreasing, and the rows that makes shuffled.

    Rows that don't make a whole step are left out. Arguments and errors are those of `padded_rows`.
    """
    tokens, order, capacity, num_ranks = _prepare(lengths, capacity, num_ranks, seed, epoch)
    packing = pack(tokens[order], capacity)
    rows = packing.num_bins // num_ranks * num_ranks
    chosen = _generator(seed, epoch, stream=1).permutation(packing.num_bins)[:rows]
    counts = np.diff(packing.offsets)[chosen]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    entries = packing.items[np.repeat(packing.offsets[chosen], counts) + within]
    return Plan(order[entries], offsets, num_ranks, capacity)


def _fixed_number(lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int, *, alike: bool) -> Plan:
    tokens, order, capacity, num_ranks = _prepare(lengths, capacity, num_ranks, seed, epoch)
    per_step = num_ranks * (capacity // int(tokens.max()))
    left = len(order) % per_step
    if left < num_ranks:
        order = order[: len(order) - left]
    position = np.arange(len(order))
    step = position // per_step
    if alike:
        order = order[np.lexsort((tokens[order], step))]
    row = step * num_ranks + position % num_ranks
    num_rows = (int(step[-1]) + 1) * num_ranks if len(step) else 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row, minlength=num_rows))])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


def _prepare(
    lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], int, int]:
    """Checked lengths, the documents in a random order, capacity and ranks."""
    capacity, num_ranks = check_integer(capacity, "capacity"), check_integer(num_ranks, "num_ranks")
    tokens = fit_lengths(lengths, capacity).lengths
    order = _generator(seed, epoch, stream=0).permutation(len(tokens)).astype(np.int32)
    return tokens, order, capacity, num_ranks


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))

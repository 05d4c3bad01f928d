"""Plans of simpler methods, for comparison: padded rows, interleaved rows, rows in order, bins of the whole epoch.

Each method draws an order of the documents from (seed, epoch) and leaves out documents that don't make a whole step.

Args of each:
    lengths: (documents,) integers, the tokens of each document, from 1 to `capacity`.
    capacity: tokens of a row, padding included.
    num_ranks: rows per step.
    seed, epoch: decide the order.

Each raises ValueError for bad lengths, a document that doesn't fit, a capacity or a number of ranks below 1.
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
    """Training without packing: as many documents per row as fit when all are padded to the longest document.

    The last step holds the remaining documents, if every rank gets one.
    """
    return _fixed_number(lengths, capacity, num_ranks, seed, epoch, alike=False)


def interleaved_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """The steps of `padded_rows`, unpadded; each step's documents are sorted by length and dealt out to the ranks.

    The multipack project compares its samplers with this method.
    """
    return _fixed_number(lengths, capacity, num_ranks, seed, epoch, alike=True)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row. Rows are dealt out to the ranks."""
    tokens, order = _prepare(lengths, capacity, num_ranks, seed, epoch)
    offsets = pack(tokens[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


def shuffled_bins(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """The whole epoch packed at once by best-fit-decreasing; the rows are shuffled."""
    tokens, order = _prepare(lengths, capacity, num_ranks, seed, epoch)
    packing = pack(tokens[order], capacity)
    rows = _generator(seed, epoch, stream=1).permutation(packing.num_bins)
    bins = [packing[row] for row in rows[: len(rows) // num_ranks * num_ranks]]
    offsets = np.cumsum([0, *map(len, bins)])
    return Plan(order[np.concatenate([*bins, np.zeros(0, np.int32)])], offsets, num_ranks, capacity)


def _fixed_number(lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int, *, alike: bool) -> Plan:
    tokens, order = _prepare(lengths, capacity, num_ranks, seed, epoch)
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
    offsets = np.cumsum([0, *np.bincount(row, minlength=num_rows)])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


def _prepare(
    lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Checked lengths, and the documents in a random order."""
    check_integer(num_ranks, "num_ranks")
    tokens = fit_lengths(lengths, capacity).lengths
    return tokens, _generator(seed, epoch, stream=0).permutation(len(tokens)).astype(np.int32)


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))

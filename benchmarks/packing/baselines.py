"""Simple ways to plan an epoch, which draw an order of the documents and leave out an incomplete step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.peers import Lengths
from tritonpack.packing.bins import pack
from tritonpack.packing.planning.plan import Plan


def interleaved_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest, each step's dealt out to ranks by length.

    The multipack project compares its samplers with this way.
    """
    order = _permutation(len(lengths), seed, epoch)
    per_step = num_ranks * (capacity // int(lengths.max()))
    left = len(order) % per_step
    order = order[: len(order) - left * (left < num_ranks)]
    position = np.arange(len(order))
    step = position // per_step
    order = order[np.lexsort((lengths[order], step))]
    row = step * num_ranks + position % num_ranks
    offsets = np.cumsum([0, *np.bincount(row, minlength=-(-len(order) // per_step) * num_ranks)])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row. Rows are dealt out to the ranks."""
    order = _permutation(len(lengths), seed, epoch)
    offsets = pack(lengths[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


def shuffled_bins(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0) -> Plan:
    """The whole epoch packed at once by best-fit-decreasing; the rows are shuffled."""
    order = _permutation(len(lengths), seed, epoch)
    packing = pack(lengths[order], capacity)
    rows = _permutation(packing.num_bins, seed, epoch, stream=1)
    bins = [packing[row] for row in rows[: len(rows) // num_ranks * num_ranks]]
    offsets = np.cumsum([0, *map(len, bins)])
    return Plan(order[np.concatenate([*bins, np.zeros(0, np.int32)])], offsets, num_ranks, capacity)


def _permutation(count: int, seed: int, epoch: int, stream: int = 0) -> NDArray[np.int32]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))
    return generator.permutation(count).astype(np.int32)

"""The strategies that `tritonpack plan` compares: tritonpack's planner and four simpler ones.

The simpler ones draw an order of the documents from the seed and the epoch. They leave out documents that don't make a
whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.bins import pack
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.planning.statistics import plan_statistics

Lengths = NDArray[Any]  # (documents,) integers, each from 1 to the capacity


def padded_rows(
    lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0, epoch: int = 0, *, by_length: bool = False
) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest document.

    The last step holds the remaining documents, if every rank gets one. With `by_length` each step's documents are
    sorted by length and dealt out to the ranks.
    """
    order = _permutation(len(lengths), seed, epoch)
    per_step = num_ranks * (capacity // int(lengths.max()))
    left = len(order) % per_step
    if left < num_ranks:
        order = order[: len(order) - left]
    position = np.arange(len(order))
    step = position // per_step
    if by_length:
        order = order[np.lexsort((lengths[order], step))]
    row = step * num_ranks + position % num_ranks
    num_rows = -(-len(order) // per_step) * num_ranks
    offsets = np.cumsum([0, *np.bincount(row, minlength=num_rows)])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


# Unpadded; the multipack project compares its samplers with this strategy.
interleaved_rows: Callable[..., Plan] = partial(padded_rows, by_length=True)


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


OURS, PADDED, NEXT_FIT = "tritonpack", "padded", "next-fit"
# Functions of (lengths, capacity, num_ranks, seed=, epoch=).
BASELINES: dict[str, Callable[..., Plan]] = {
    PADDED: padded_rows, "interleaved": interleaved_rows, NEXT_FIT: next_fit_rows, "best-fit": shuffled_bins
}  # fmt: skip


class Result(NamedTuple):
    """The plan that a strategy made, and each of its statistics."""

    name: str
    plan: Plan
    measures: dict[str, float | None]


def measure(name: str, plan: Plan, lengths: Lengths, total_tokens: int) -> Result:
    """Measure the plan of a strategy.

    `total_tokens` counts all documents as they were before they were truncated, split or dropped.
    """
    found = plan_statistics(plan, lengths, padded=name == PADDED)
    covered = found.tokens_covered * int(lengths.sum()) / total_tokens
    measures = {"documents_per_step": found.documents_per_step, "tokens_covered": covered}
    return Result(name, plan, asdict(found) | measures)

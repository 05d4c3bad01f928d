"""The strategies that `tritonpack plan` compares: tritonpack's planner and two simpler ones.

The simpler ones draw an order of the documents from the seed. They leave out documents that don't make a whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.bins import pack
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.planning.statistics import plan_statistics

Lengths = NDArray[Any]  # (documents,) integers, each from 1 to the capacity


def padded_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest document.

    The last step holds the remaining documents, if every rank gets one.
    """
    order = _permutation(len(lengths), seed)
    per_step = num_ranks * (capacity // int(lengths.max()))
    left = len(order) % per_step
    if left < num_ranks:
        order = order[: len(order) - left]
    position = np.arange(len(order))
    row = position // per_step * num_ranks + position % num_ranks
    num_rows = -(-len(order) // per_step) * num_ranks
    offsets = np.cumsum([0, *np.bincount(row, minlength=num_rows)])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


def next_fit_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int = 0) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row. Rows are dealt out to the ranks."""
    order = _permutation(len(lengths), seed)
    offsets = pack(lengths[order], capacity, algorithm="next_fit").offsets
    kept = offsets[: (len(offsets) - 1) // num_ranks * num_ranks + 1]
    return Plan(order[: kept[-1]], kept, num_ranks, capacity)


def _permutation(count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


OURS, PADDED = "tritonpack", "padded"
# Functions of (lengths, capacity, num_ranks, seed=).
BASELINES: dict[str, Callable[..., Plan]] = {PADDED: padded_rows, "next-fit": next_fit_rows}


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
    return Result(name, plan, asdict(found) | {"tokens_covered": covered})

"""Times of `pack` and the planner, on log-normal lengths with mean 598, at most 8,192; results are checked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.registry import OURS, register
from tests.lengths import log_normal
from tritonpack.packing import pack
from tritonpack.packing.bins import Algorithm
from tritonpack.packing.planning.plan import Objective, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

MILLION = 1_000_000


@lru_cache(maxsize=1)
def lengths_of(documents: int) -> NDArray[np.int32]:
    return log_normal(documents).astype(np.int32)


@register("pack", capacity=(8192, 32768, 131072), documents=(MILLION, 10 * MILLION), repeats=5)
def packing(capacity: int, documents: int) -> dict[str, Any]:
    return packed(capacity, documents, "best_fit_decreasing", 0.999)


@register("pack", algorithm=("best_fit", "next_fit"), repeats=5)
def other_algorithms(algorithm: Algorithm) -> dict[str, Any]:
    return packed(32768, MILLION, algorithm, 0.97)


def packed(capacity: int, documents: int, algorithm: Algorithm, least: float) -> dict[str, Any]:
    lengths = lengths_of(documents)
    found = pack(lengths, capacity, algorithm=algorithm)
    assert found.num_tokens == lengths.sum(dtype=np.int64)
    assert found.efficiency > least
    return {OURS: lambda: pack(lengths, capacity, algorithm=algorithm)}


@register("plan_epoch", objective=("quadratic", "linear"), ranks=(8, 64, 1024), repeats=5)
def planning(objective: Objective, ranks: int) -> dict[str, Any]:
    lengths = lengths_of(MILLION)
    plan = plan_epoch(lengths, 32768, ranks, objective=objective)
    found = plan_statistics(plan, lengths)
    assert found.efficiency > 0.99
    assert found.documents == len(plan.items)
    return {OURS: lambda: plan_epoch(lengths, 32768, ranks, objective=objective)}


@register("plan_statistics", documents=(MILLION,))
def statistics(documents: int) -> dict[str, Any]:
    lengths = lengths_of(documents)
    plan = plan_epoch(lengths, 32768, 8)
    assert plan_statistics(plan, lengths).tokens == int(lengths[plan.items].sum(dtype=np.int64))
    return {OURS: lambda: plan_statistics(plan, lengths)}

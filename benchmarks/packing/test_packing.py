"""Times of `pack` and the planner: `python -m pytest benchmarks/packing --benchmark-only`.

The lengths are log-normal with mean 598, at most 8,192. Results are checked before pytest prints the times.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from tests.lengths import log_normal
from tritonpack.packing import pack
from tritonpack.packing.bins import Algorithm
from tritonpack.packing.planning.plan import Objective, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

MILLION = 1_000_000


@lru_cache(maxsize=1)
def lengths_of(documents: int) -> NDArray[np.int32]:
    return log_normal(documents).astype(np.int32)


@pytest.mark.parametrize("documents", [MILLION, 10 * MILLION])
@pytest.mark.parametrize("capacity", [8192, 32768, 131072])
def test_pack(benchmark: BenchmarkFixture, documents: int, capacity: int) -> None:
    lengths = lengths_of(documents)
    packing = benchmark.pedantic(pack, (lengths, capacity), rounds=5, warmup_rounds=1)
    assert packing.num_tokens == lengths.sum(dtype=np.int64)
    assert packing.efficiency > 0.999


@pytest.mark.parametrize("algorithm", ["best_fit", "next_fit", "windowed"])
def test_other_algorithms(benchmark: BenchmarkFixture, algorithm: Algorithm) -> None:
    lengths = lengths_of(MILLION)
    packing = benchmark.pedantic(pack, (lengths, 32768), {"algorithm": algorithm}, rounds=3, warmup_rounds=1)
    assert packing.num_tokens == lengths.sum(dtype=np.int64)
    assert packing.efficiency > 0.97


@pytest.mark.parametrize("objective", ["quadratic", "linear"])
@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_plan_epoch(benchmark: BenchmarkFixture, ranks: int, objective: Objective) -> None:
    lengths = lengths_of(MILLION)
    arguments = {"objective": objective}
    plan = benchmark.pedantic(plan_epoch, (lengths, 32768, ranks), arguments, rounds=3, warmup_rounds=1)
    found = plan_statistics(plan, lengths)
    assert found.efficiency > 0.99
    assert found.documents == len(plan.items)


@pytest.mark.parametrize("documents", [MILLION])
def test_plan_statistics(benchmark: BenchmarkFixture, documents: int) -> None:
    lengths = lengths_of(documents)
    plan = plan_epoch(lengths, 32768, 8)
    found = benchmark.pedantic(plan_statistics, (plan, lengths), rounds=5, warmup_rounds=1)
    assert found.tokens == int(lengths[plan.items].sum(dtype=np.int64))

"""Building masks on a CPU, and writing them out beside the usual ways (`benchmarks/gpu/masks.py` has the calls)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.masks import builders, writers

MANY, FEW = 131_072, 4096  # FEW for masks whose memory is quadratic in tokens
CPU = torch.device("cpu")
BUILT = ("from_cu_seqlens", "from_position_ids", "from_segment_ids", "from_tree", "transpose", "tile_tables")
WRITTEN = {
    ("bool", "tritonpack"): "to_dense bool",
    ("additive bfloat16", "tritonpack"): "to_dense additive bf16",
    ("bits", "tritonpack"): "to_bits",
    ("block mask", "tritonpack"): "to_block_mask",
    ("block mask", "create_block_mask"): "create_block_mask (torch)",
}
building, writing = cache(builders), cache(writers)


@pytest.mark.parametrize("case", BUILT)
def test_build(benchmark: BenchmarkFixture, case: str) -> None:
    benchmark.group = f"masks, {MANY} tokens"
    benchmark.pedantic(building(MANY, CPU)[case], rounds=20, warmup_rounds=2)


@pytest.mark.parametrize(("case", "implementation"), WRITTEN)
def test_write(benchmark: BenchmarkFixture, case: str, implementation: str) -> None:
    benchmark.group = f"masks written out, {FEW} tokens"
    benchmark.pedantic(writing(FEW, CPU)[0][WRITTEN[case, implementation]], rounds=10, warmup_rounds=2)

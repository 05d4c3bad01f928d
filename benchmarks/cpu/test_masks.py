"""Building masks on a CPU, and the mask forms of other libraries beside the usual way to build them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.lengths import distributions
from tritonpack import BlockDiagonalMask

MANY, FEW = 131_072, 4096  # FEW for masks whose memory is quadratic in tokens


@lru_cache
def lengths_of(tokens: int) -> list[int]:
    return distributions(tokens)["flan"]


@lru_cache
def rows_of(tokens: int) -> dict[str, Tensor]:
    lengths = torch.tensor(lengths_of(tokens))
    segments = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths_of(tokens)]))
    return {"segment_ids": segments[None], "position_ids": positions[None]}


BUILDERS: dict[str, Callable[[], BlockDiagonalMask]] = {
    "from_seqlens": lambda: BlockDiagonalMask.from_seqlens(lengths_of(MANY)),
    "from_position_ids": lambda: BlockDiagonalMask.from_position_ids(rows_of(MANY)["position_ids"]),
    "from_segment_ids": lambda: BlockDiagonalMask.from_segment_ids(rows_of(MANY)["segment_ids"]),
    "transpose": lambda: BlockDiagonalMask.from_seqlens(lengths_of(MANY)).transpose(),
}


@pytest.mark.parametrize("case", BUILDERS)
def test_build(benchmark: BenchmarkFixture, case: str) -> None:
    benchmark.group = f"masks, {MANY} tokens"
    mask = benchmark.pedantic(BUILDERS[case], rounds=20, warmup_rounds=2)
    assert mask.num_queries == MANY


def by_comparing() -> Tensor:
    """The dense mask without intervals: every pair of positions is compared."""
    segments, place = rows_of(FEW)["segment_ids"][0], torch.arange(FEW)
    return (segments[:, None] == segments[None, :]) & (place[:, None] >= place[None, :])


DENSE: dict[str, Callable[[], Tensor]] = {
    "tritonpack": lambda: BlockDiagonalMask.from_segment_ids(rows_of(FEW)["segment_ids"]).to_dense(),
    "comparing all pairs": by_comparing,
}


@pytest.mark.parametrize("implementation", DENSE)
def test_dense(benchmark: BenchmarkFixture, implementation: str) -> None:
    benchmark.group = f"dense mask, {FEW} tokens"
    dense = benchmark.pedantic(DENSE[implementation], rounds=20, warmup_rounds=2)
    assert torch.equal(dense.view(FEW, FEW), by_comparing())


def by_mask_function() -> object:
    segments = rows_of(FEW)["segment_ids"][0]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (segments[query] == segments[key]) & (query >= key)

    return create_block_mask(sees, None, None, FEW, FEW, device="cpu")


BLOCK: dict[str, Callable[[], object]] = {
    "tritonpack": lambda: BlockDiagonalMask.from_segment_ids(rows_of(FEW)["segment_ids"]).to_block_mask(),
    "create_block_mask": by_mask_function,
}


@pytest.mark.parametrize("implementation", BLOCK)
def test_block_mask(benchmark: BenchmarkFixture, implementation: str) -> None:
    benchmark.group = f"FlexAttention's block mask, {FEW} tokens"
    block_mask = benchmark.pedantic(BLOCK[implementation], rounds=10, warmup_rounds=2)
    assert torch.equal(block_mask.to_dense(), by_mask_function().to_dense())  # type: ignore[attr-defined]

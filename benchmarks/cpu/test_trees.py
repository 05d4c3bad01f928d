"""Attention over a group of completions on one prompt, beside sdpa with a dense mask and the sequences without sharing.

`python -m benchmarks.cpu -k trees`. Forward and backward together; the results of every implementation are compared
with float64 attention before it is timed. FlexAttention computes only forward on a CPU, so it has a row of its own.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness.batch import Shape, make_batch
from benchmarks.harness.peers import OURS, PEERS, Prepared
from benchmarks.harness.verify import ResultCheck
from tests.trees import group, path_lengths
from tritonpack import BlockDiagonalMask
from tritonpack.backends.blocked import plan_rows
from tritonpack.testing.cases import parents_of

NODES = group(2048, [256] * 8)
CASE = "8 x 256 on 2,048"
TOKENS, PATHS = sum(tokens for _, tokens in NODES), path_lengths(NODES)
BY_NAME = {peer.name: peer for peer in PEERS}
UNSHARED = {f"{OURS}, unshared": OURS, "sdpa, padded, unshared": "sdpa, padded"}


@lru_cache
def prepared(implementation: str) -> Prepared:
    shared = implementation not in UNSHARED
    tokens, lengths = (TOKENS, [TOKENS]) if shared else (sum(PATHS), PATHS)
    shape = Shape(CASE, tokens, heads=8, kv_heads=2, head_dim=64, dtype="float32", trees=shared)
    batch = make_batch(shape, lengths, "cpu", parents=parents_of(NODES) if shared else None)
    peer = Prepared(BY_NAME[UNSHARED.get(implementation, implementation)], batch)
    check, out = ResultCheck(batch), peer.forward()
    check.check_forward(peer.leave(out))
    if out.requires_grad:
        check.check_backward(out, peer)
    return peer


@pytest.mark.parametrize("implementation", [OURS, *UNSHARED, "sdpa, dense mask"])
@pytest.mark.parametrize("case", [CASE])
def test_trees(benchmark: BenchmarkFixture, case: str, implementation: str) -> None:
    benchmark.group = "trees, forward and backward"
    benchmark.pedantic(prepared(implementation).both, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("implementation", [OURS, "sdpa, dense mask", "FlexAttention"])
@pytest.mark.parametrize("case", [CASE])
def test_trees_forward(benchmark: BenchmarkFixture, case: str, implementation: str) -> None:
    benchmark.group = "trees, forward"
    peer = prepared(implementation)
    with torch.no_grad():
        benchmark.pedantic(peer.forward, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("case", ["8 groups, 32,768 tokens"])
def test_building_trees(benchmark: BenchmarkFixture, case: str) -> None:
    """The mask from the parents, and the plan of the backend of CPUs."""
    benchmark.group = "trees, mask and blocks"
    parents = torch.tensor(parents_of(*[NODES] * 8))
    benchmark(lambda: plan_rows(BlockDiagonalMask.from_tree(parents), fuse=True, pack_invariant=False))

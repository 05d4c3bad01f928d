"""The blocked backend beside sdpa on a CPU: padded, a document per row, and packed with a dense mask.

`python -m pytest benchmarks/cpu --benchmark-only`; with rows in the ledger: `python -m benchmarks.cpu`. What every
implementation computes is held against float64 before it is timed.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.lengths import distributions
from tritonpack.cli.bench.batch import Batch, Shape, make_batch
from tritonpack.cli.bench.measure import backward_of, verify
from tritonpack.cli.bench.peers import Prepared, peers_for

TOKENS = 4096
CPU = torch.device("cpu")
SHAPE = Shape(TOKENS, heads=8, kv_heads=2, head_dim=64, dtype=torch.float32, device=CPU)
LENGTHS = distributions(TOKENS)
PEERS = {peer.name: peer for peer in peers_for(CPU)}


@lru_cache(maxsize=1)
def batch_of(distribution: str) -> Batch:
    return make_batch(tuple(LENGTHS[distribution]), SHAPE)


@lru_cache(maxsize=1)
def peer_for(distribution: str, implementation: str) -> Prepared:
    peer = Prepared(PEERS[implementation], batch_of(distribution))
    verify(batch_of(distribution), peer)
    return peer


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("implementation", PEERS)
@pytest.mark.parametrize("case", LENGTHS)
def test_attention(benchmark: BenchmarkFixture, case: str, implementation: str, direction: str) -> None:
    try:
        peer = peer_for(case, implementation)
    except ValueError as error:  # more padding than anybody would take
        pytest.skip(str(error))
    benchmark.group = f"attention {direction}, {TOKENS} tokens"
    call = peer.forward if direction == "forward" else backward_of(peer)
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)

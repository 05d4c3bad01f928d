"""The blocked backend beside sdpa on a CPU: padded, a document per row, and packed with a dense mask.

Padded sdpa gets its rows laid out already, as in training on padded batches. In `sdpa, padded in the call` it gets
packed rows: it pads them and takes the padding out again, as a layer of a packed model has to.

`python -m pytest benchmarks/cpu --benchmark-only`; with rows in the ledger: `python -m benchmarks.cpu`. The results of
every implementation are compared with float64 attention before it is timed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.harness.batch import Batch, Shape, make_batch
from benchmarks.harness.peers import Attention, Peer, Prepared, peers_for, sdpa_padded
from benchmarks.harness.verify import ResultCheck
from tests.lengths import distributions, fill

TOKENS = 4096
SHAPE = Shape("", TOKENS, heads=8, kv_heads=2, head_dim=64, dtype="float32")


def between(fewest: int, most: int) -> list[int]:
    return fill(np.random.default_rng(0).integers(fewest, most + 1, TOKENS), TOKENS)


LENGTHS = distributions(TOKENS) | {"short": between(16, 32), "medium": between(96, 192)}


def sdpa_padding_its_rows(batch: Batch) -> Attention:
    """Padded sdpa on packed tensors, copied to rows of documents and back."""
    attention, documents, longest = sdpa_padded(batch), len(batch.lengths), max(batch.lengths)
    place = torch.arange(longest)
    tokens = (place < batch.cu_seqlens.diff()[:, None]).flatten().nonzero().flatten()

    def enter(x: Tensor) -> Tensor:
        rows = x.new_zeros(documents * longest, *x.shape[1:]).index_copy(0, tokens, x)
        return rows.unflatten(0, (documents, longest)).transpose(1, 2)

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(enter(q), enter(k), enter(v)).transpose(1, 2).flatten(0, 1).index_select(0, tokens)

    return padded


PEERS = {peer.name: peer for peer in peers_for(SHAPE, torch.device("cpu"))}
PEERS["sdpa, padded in the call"] = Peer("sdpa, padded in the call", sdpa_padding_its_rows)


@lru_cache(maxsize=1)
def batch_of(distribution: str) -> tuple[Batch, ResultCheck]:
    batch = make_batch(SHAPE, LENGTHS[distribution], "cpu")
    return batch, ResultCheck(batch)


@lru_cache(maxsize=1)
def peer_for(distribution: str, implementation: str) -> Prepared:
    batch, check = batch_of(distribution)
    peer = Prepared(PEERS[implementation], batch)
    out = peer.forward()
    check.check_forward(peer.leave(out))
    check.check_backward(out, peer)
    return peer


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("implementation", PEERS)
@pytest.mark.parametrize("case", LENGTHS)
def test_attention(benchmark: BenchmarkFixture, case: str, implementation: str, direction: str) -> None:
    try:
        peer = peer_for(case, implementation)
    except ValueError as error:  # too much padding
        pytest.skip(str(error))
    benchmark.group = f"attention {direction}, {TOKENS} tokens"
    if direction == "forward":
        benchmark.pedantic(peer.forward, rounds=5, warmup_rounds=1)
    else:
        benchmark.pedantic(peer.backward, args=(peer.forward(),), rounds=5, warmup_rounds=1)

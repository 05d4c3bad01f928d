"""The blocked backend beside sdpa on a CPU: padded, a document per row, and packed with a dense mask.

Padded sdpa gets its rows laid out already, as in training on padded batches. In `sdpa, padded in the call` it gets
packed rows: it pads them and takes the padding out again, as a layer of a packed model has to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.batch import Batch, Shape, make_batch
from benchmarks.harness.peers import Attention, Peer, padded, peers_for, sdpa_padded
from benchmarks.harness.registry import register
from benchmarks.harness.verify import OPS, checked
from tests.lengths import distributions, fill

TOKENS = 4096
SHAPE = Shape("", TOKENS, heads=8, kv_heads=2, head_dim=64, dtype="float32")


def between(fewest: int, most: int) -> list[int]:
    return fill(np.random.default_rng(0).integers(fewest, most + 1, TOKENS), TOKENS)


LENGTHS = distributions(TOKENS) | {"short": between(16, 32), "medium": between(96, 192)}


def sdpa_padding_its_rows(batch: Batch) -> Attention:
    """Padded sdpa on packed tensors, copied to rows of documents and back."""
    attention, (enter, leave) = sdpa_padded(batch), padded(batch)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return leave(attention(enter(q), enter(k), enter(v)))

    return packed


PEERS = [*peers_for(SHAPE, torch.device("cpu")), Peer("sdpa, padded in the call", sdpa_padding_its_rows)]


@register(*(f"attention {op}, {TOKENS} tokens" for op in OPS), case=tuple(LENGTHS), repeats=5)
def attention(case: str) -> dict[str, Any]:
    return checked(make_batch(SHAPE, LENGTHS[case], "cpu"), PEERS)

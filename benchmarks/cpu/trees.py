"""Attention over a group of completions on one prompt, beside sdpa with a dense mask and the sequences without sharing.

FlexAttention computes only forward on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness.batch import Shape, make_batch
from benchmarks.harness.peers import PEERS
from benchmarks.harness.registry import OURS, register
from benchmarks.harness.verify import checked
from tests.trees import group, path_lengths
from tritonpack import BlockDiagonalMask
from tritonpack.backends.blocked import plan_rows
from tritonpack.testing.cases import parents_of

NODES = group(2048, [256] * 8)
CASE = "8 x 256 on 2,048"


@register("trees, forward", "trees, backward", "trees, forward and backward", case=(CASE,), repeats=5)
def trees(case: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for suffix, names in (("", (OURS, "sdpa, dense mask", "FlexAttention")), (", unshared", (OURS, "sdpa, padded"))):
        lengths = path_lengths(NODES) if suffix else [sum(tokens for _, tokens in NODES)]
        shape = Shape(case, sum(lengths), heads=8, kv_heads=2, head_dim=64, dtype="float32", trees=not suffix)
        batch = make_batch(shape, lengths, "cpu", parents=None if suffix else parents_of(NODES))
        calls = checked(batch, [peer for peer in PEERS if peer.name in names])
        found |= {f"{name}{suffix}": call for name, call in calls.items()}
    return found


@register("trees, mask and blocks", case=("8 groups, 32,768 tokens",))
def building_trees(case: str) -> dict[str, Any]:
    """The mask from the parents, and the plan of the backend of CPUs."""
    parents = torch.tensor(parents_of(*[NODES] * 8))
    return {OURS: lambda: plan_rows(BlockDiagonalMask.from_tree(parents), fuse=True, pack_invariant=False)}

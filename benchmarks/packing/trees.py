"""Times of trees from lists of tokens; results are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.registry import OURS, register
from tritonpack.packing import pack_tree
from tritonpack.packing.trees.prefixes import joined, prefix_tree

ROWS, LENGTH = 64, 4096
CASES = (
    "8 groups with 2,048 in common", "nothing in common", "nothing in common, reversed", "all equal",
    "the last token differs", "1,000 short rows with one in common",
)  # fmt: skip


def batch_of(case: str) -> tuple[NDArray[np.int64], int]:
    """Rows of tokens, and how many of them are distinct."""
    if case == "1,000 short rows with one in common":
        rows = np.random.default_rng(0).integers(0, 2**17, (1000, 20))
        rows[:, 0], rows[:, 1] = 0, np.arange(1000)
        return rows, 1 + 1000 * 19
    rows = np.random.default_rng(0).integers(0, 2**17, (ROWS, LENGTH))
    if case == "8 groups with 2,048 in common":
        rows[:, :2048] = rows[::8, :2048].repeat(8, axis=0)
        rows[:, 2048] = np.arange(ROWS)
        return rows, 8 * 2048 + ROWS * 2048
    if "nothing in common" in case:
        rows[:, 0] = np.arange(ROWS)[::-1] if case.endswith("reversed") else np.arange(ROWS)
        return rows, ROWS * LENGTH
    rows[:] = rows[0]
    if case == "all equal":
        return rows, LENGTH
    rows[:, -1] = np.arange(ROWS)[::-1]
    return rows, LENGTH - 1 + ROWS


@register("prefix_tree", case=CASES, channels=(1, 3))
def prefix_trees(case: str, channels: int) -> dict[str, Any]:
    rows, distinct = batch_of(case)
    tokens, lengths = rows.reshape(-1), np.full(*rows.shape)
    others = [np.tile(np.arange(rows.shape[1]), len(rows)), np.zeros_like(tokens)]

    def make() -> Any:
        return prefix_tree(tokens if channels == 1 else joined([tokens, *others]), lengths)

    tree = make()
    assert len(tree.sources) == distinct
    assert (tokens[tree.sources][tree.places] == tokens).all()
    return {OURS: make}


def completions(groups: int) -> list[list[int]]:
    """8 completions of 256 tokens on each prompt of 2,048."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        prompt = [group, *rng.integers(0, 2**17, 2047).tolist()]
        rows += [[*prompt, number, *rng.integers(0, 2**17, 255).tolist()] for number in range(8)]
    return rows


@register("pack_tree")
def packed_trees() -> dict[str, Any]:
    """From lists, which take most of the time to convert, to the batch, without a mask."""
    rows = completions(4)
    assert sum(map(len, rows)) / pack_tree(rows).num_tokens == 4.5
    return {OURS: lambda: pack_tree(rows)}

"""Masks of trees, and trees for measurements: prompts with completions, pairs of answers, an agent's turns."""

from __future__ import annotations

from functools import partial

import numpy as np

from tritonpack import BlockDiagonalMask
from tritonpack.checks import Lengths, Window, check_reach
from tritonpack.masks.block_diagonal import mask_from_intervals
from tritonpack.masks.tree import ROOT, forest_intervals
from tritonpack.testing.cases import Nodes


def mask_of_ends(ends: Lengths, window: Window = (-1, -1), chunk_size: int | None = None) -> BlockDiagonalMask:
    """The mask of the end of each token's subtree, as `tree_ends` of a patched model's call gives it."""
    return mask_from_intervals(partial(forest_intervals, ends, "ends"), check_reach(window, True, chunk_size))


def group(prompt: int, completions: list[int]) -> Nodes:
    """A prompt and its completions."""
    return [(ROOT, prompt), *((0, tokens) for tokens in completions)]


def turns(prompt: int, branches: list[int], tokens: tuple[int, int], rng: np.random.Generator) -> Nodes:
    """A prompt and turns that branch: each node of turn n has `branches[n]` children of `tokens` tokens."""
    nodes = [(ROOT, prompt)]

    def grow(parent: int, turn: int) -> None:
        for _ in range(branches[turn] if turn < len(branches) else 0):
            nodes.append((parent, int(rng.integers(*tokens))))
            grow(len(nodes) - 1, turn + 1)

    grow(0, 0)
    return nodes


def tree_batches() -> dict[str, list[Nodes]]:
    """Name -> the trees of a batch; lengths of completions are log-normal where they aren't given."""
    rng = np.random.default_rng(0)

    def drawn(median: float, sigma: float, count: int) -> list[int]:
        return rng.lognormal(np.log(median), sigma, count).astype(int).tolist()

    return {
        "8 x 256 on 2,048": [group(2048, [256] * 8)] * 4,
        "16 x ~600 on 700": [group(700, drawn(500, 0.6, 16)) for _ in range(3)],
        "8 x ~3,000 on 500": [group(500, drawn(2700, 0.4, 8))],
        "pairs of 300 on 600": [group(600, [300, 280])] * 16,
        "agent, 6 turns": [turns(1500, [2, 2, 1, 2, 1, 1], (100, 700), rng)],
    }


def path_lengths(nodes: Nodes) -> list[int]:
    """The tokens of each path from the root to a leaf: the lengths of the sequences without sharing."""
    inner, lengths = {parent for parent, _ in nodes}, {ROOT: 0}
    for number, (parent, tokens) in enumerate(nodes):
        lengths[number] = lengths[parent] + tokens
    return [lengths[number] for number in range(len(nodes)) if number not in inner]

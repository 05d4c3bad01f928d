"""Random lengths, intervals, and positions of documents with images."""

from __future__ import annotations

import random

import torch

from tritonpack import BlockDiagonalMask
from tritonpack.checks import Window

WINDOWS: tuple[Window, ...] = ((-1, -1), (0, 0), (3, 0), (0, 2), (2, 1), (-1, 1), (4, -1), (100, 100))


def random_lengths(rng: random.Random, documents: int) -> list[int]:
    """Random lengths, about a third of them 0."""
    return [rng.choice((0, rng.randint(1, 3), rng.randint(1, 9))) for _ in range(documents)]


def random_intervals(rng: random.Random, most: int = 12) -> BlockDiagonalMask:
    """A random mask: ascending bounds, with empty rows at random places."""
    queries, keys = rng.randint(0, most), rng.randint(0, most)
    bounds = [sorted(rng.randint(0, keys) for _ in range(queries)) for _ in range(2)]
    bounds[1] = [max(pair) for pair in zip(*bounds, strict=True)]
    return BlockDiagonalMask(*(torch.tensor(x, dtype=torch.int32) for x in bounds), keys)


def distances(mask: BlockDiagonalMask) -> torch.Tensor:
    """(num_queries, num_keys), how far each key lies from each query's own place, as ALiBi counts it."""
    assert mask.diagonal is not None
    places = torch.arange(mask.num_keys) if mask.key_places is None else mask.key_places
    return (mask.diagonal[:, None] - places).abs()


def random_multimodal_document(rng: random.Random) -> list[tuple[int, int, int]]:
    """(time, height, width) of each token, as in Qwen2-VL: a part begins after the largest number so far."""
    tokens: list[tuple[int, int, int]] = []
    for _ in range(rng.randint(1, 4)):
        first = max((max(token) for token in tokens), default=-1) + 1
        if rng.random() < 0.5:
            tokens += [(first + n,) * 3 for n in range(rng.randint(1, 4))]
        else:
            frames, height, width = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 3)
            tokens += [
                (first + t, first + h, first + w) for t in range(frames) for h in range(height) for w in range(width)
            ]
    return tokens

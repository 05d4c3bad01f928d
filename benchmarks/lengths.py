"""Document lengths to measure with: real counts where a file is at hand, documented generators otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def _fill(lengths: np.ndarray, tokens: int) -> list[int]:
    """The first lengths that fill the batch, the last one cut to fit exactly."""
    taken: list[int] = []
    left = tokens
    for length in lengths.tolist():
        taken.append(min(int(length), left))
        left -= taken[-1]
        if not left:
            return taken
    raise ValueError(f"{len(lengths)} lengths hold {tokens - left} tokens, fewer than the {tokens} asked for.")


def _log_normal(mean: float, sigma: float, low: int, high: int, tokens: int, seed: int) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, 4 * tokens // low)
    return _fill(np.clip(draws, low, high).astype(np.int64), tokens)


def distributions(tokens: int, lengths_file: Path | None = None) -> dict[str, list[int]]:
    """Name -> lengths that sum to `tokens`.

    one: a single document. skewed: half the tokens in one document, the rest in documents of 256. stdlib: log-normal,
    mean 700, sigma 1.2, the shape of the standard library's documented functions. flan: log-normal, mean 200, sigma
    0.8.
    tiny: documents of 20. file: the counts of a JSON list, in order.
    """
    short = tokens // 2
    batches = {
        "one": [tokens],
        "skewed": [tokens - short, *_fill(np.full(short, 256), short)],
        "stdlib": _log_normal(700, 1.2, 16, 16384, tokens, seed=0),
        "flan": _log_normal(200, 0.8, 8, 4096, tokens, seed=0),
        "tiny": _fill(np.full(tokens, 20), tokens),
    }
    if lengths_file is not None:
        batches["file"] = _fill(np.array(json.loads(lengths_file.read_text()) * 4), tokens)
    return batches


def visible_pairs(lengths: list[int]) -> int:
    """How many (query, key) pairs a causal batch computes."""
    return sum(n * (n + 1) // 2 for n in lengths)

"""Document lengths for measurements, from documented generators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# The mean and the spread (sigma) of log-normal lengths like those of two data sets, see `flan` and `orca_math`.
FLAN, ORCA_MATH = (200, 0.8), (320, 0.4)


def fill(lengths: np.ndarray, tokens: int) -> list[int]:
    """The first lengths that fill the batch, the last one cut to fit exactly.

    Raises:
        ValueError: they hold fewer tokens than that.
    """
    ends = lengths.astype(np.int64).cumsum()
    held = int(ends[-1]) if len(ends) else 0
    if held < tokens:
        raise ValueError(f"{len(lengths)} lengths hold {held} tokens, fewer than the {tokens} asked for.")
    return np.diff(np.append(ends[: np.searchsorted(ends, tokens)], tokens), prepend=0).tolist()


def _log_normal(mean: float, sigma: float, low: int, high: int, tokens: int) -> list[int]:
    return fill(np.maximum(log_normal(4 * tokens // low, mean, sigma, high), low), tokens)


def distributions(tokens: int) -> dict[str, list[int]]:
    """Name -> lengths that sum to `tokens`.

    one: a single document. skewed: half the tokens in one document, the rest in documents of 256. stdlib: log-normal,
    as the standard library's documented functions. flan, orca: as `flan` and `orca_math`. openchat: as `lookalike`.
    tiny: documents of 20.
    """
    short = tokens // 2
    return {
        "one": [tokens],
        "skewed": [tokens - short, *fill(np.full(short, 256), short)],
        "stdlib": _log_normal(700, 1.2, 16, 16384, tokens),
        "flan": _log_normal(*FLAN, 8, 4096, tokens),
        "orca": _log_normal(*ORCA_MATH, 32, 2048, tokens),
        "openchat": fill(np.resize(lookalike(), tokens // 24 + 1), tokens),
        "tiny": fill(np.full(tokens, 20), tokens),
    }


def lookalike(documents: int = 6144, seed: int = 0) -> np.ndarray:
    """(documents,) int64: lengths like those of the OpenChat conversations that the multipack project publishes.

    Those are 6,144 conversations cut at 2,048 tokens, which 3,160 of them reach; the others have 24 to 2,047 tokens,
    1,022 in the mean with a standard deviation of 507, which a beta distribution between these bounds gives. The mean
    of all is 1,550. Order is random.
    """
    rng = np.random.default_rng(seed)
    cut = round(documents * 3160 / 6144)
    low, high, mean, deviation = 24, 2047, 1022, 507
    share = (mean - low) / (high - low)
    strength = share * (1 - share) / (deviation / (high - low)) ** 2 - 1
    others = low + (high - low) * rng.beta(share * strength, (1 - share) * strength, documents - cut)
    return rng.permutation(np.concatenate([np.full(cut, 2048), np.rint(others).astype(np.int64)]))


def log_normal(documents: int, mean: float = 600, sigma: float = 1.0, high: int = 8192, seed: int = 0) -> np.ndarray:
    """(documents,) int64: log-normal lengths from 1 to `high`; `mean` is that before they are cut at `high`."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, documents)
    return np.clip(draws, 1, high).astype(np.int64)


def flan(documents: int, seed: int = 0) -> np.ndarray:
    """(documents,) int64: short lengths that differ much, as FLAN's: log-normal with a mean of 200.

    With this spread the longest of four documents is 1.95 times their mean, as long as padding makes all of them: what
    was published for batches of four is 2.0 times the throughput (Kundu et al., arXiv:2407.09105, and the posts on it).
    """
    return log_normal(documents, *FLAN, 4096, seed)


def orca_math(documents: int, seed: int = 0) -> np.ndarray:
    """(documents,) int64: longer lengths that differ less, as OrcaMath's: log-normal with a mean of 320.

    The longest of four is 1.45 times their mean; published are 1.4 times the throughput. Its data card counts 1,126
    bytes an example; 3.5 bytes a token are assumed.
    """
    return log_normal(documents, *ORCA_MATH, 4096, seed)


def visible_pairs(lengths: list[int]) -> int:
    """How many (query, key) pairs a causal batch computes."""
    return sum(n * (n + 1) // 2 for n in lengths)


def packs(tokens: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Names of distributions with lengths that sum to `tokens`, `count` times each but for the single document.

    Documents are log-normal, by median and sigma, as in supervised fine-tuning data, and with a long tail; or they are
    conversations, as `lookalike` draws them.
    """
    conversations = lookalike()
    for seed in range(count):
        rng = np.random.default_rng(seed)
        for name, (median, sigma) in {
            "short (median 700)": (700, 1.0),
            "long tail (median 2,000)": (2000, 1.6),
        }.items():
            yield name, fill(np.maximum(rng.lognormal(np.log(median), sigma, tokens // 64), 1), tokens)
        drawn = rng.permutation(np.tile(conversations, -(-tokens // int(conversations.sum()))))
        yield "conversations (mean 1,550)", fill(drawn, tokens)
    yield "one document", [tokens]

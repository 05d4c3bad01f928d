"""The order of documents in an epoch: shuffled, given, or mixed from several datasets by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.packing.lengths import MAX_INT32, check_integer, whole_lengths

Until = Literal["first_exhausted", "all_exhausted"]
# Document numbers, or a function of a seed and an epoch that returns them. A document may come more than once. Lists
# are taken, too.
Order = NDArray[np.integer] | Callable[[int, int], NDArray[np.integer]]


def shuffled(count: int, *seed: int) -> NDArray[np.int32]:
    """0 to count - 1 in a random order; every seed, such as a seed and an epoch, has its own."""
    numbers = [check_integer(number, "seed" if place == 0 else "epoch", 0, None) for place, number in enumerate(seed)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers))).permutation(count).astype(np.int32)


def given_order(order: Order, count: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """The document numbers of a given order; ValueError if they aren't numbers of `count` documents."""
    numbers = order(seed, epoch) if callable(order) and not isinstance(order, type) else order
    numbers = np.asarray(numbers) if isinstance(numbers, (list, tuple, range)) else numbers
    rule = f"order must be a one-dimensional array with numbers of documents, 0 to {count - 1}, or return one"
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"{rule}; got {numbers!r:.100}.")
    outside = (numbers < 0) | (numbers >= count)
    if outside.any():
        raise ValueError(f"{rule}; got {numbers[np.argmax(outside)]}.")
    return numbers.astype(np.int32)


class Mixture:
    """The order of documents of several datasets that are mixed by weight.

    Weights are shares of tokens. The next document is of the dataset that is farthest behind its share, so every
    beginning of the order has these shares, but for about a document of each dataset. An epoch begins where the epoch
    before ended, so over the epochs each document of a dataset is used equally often, to within one.

    Two datasets, of 6 and of 12 tokens. Two thirds of the tokens come from the first. An epoch ends when that one is
    used up, and goes through a quarter of the second:

    >>> mixture = Mixture([[2, 2, 2], [3, 3, 3, 3]], weights=[2, 1], shuffle=False)
    >>> [mixture(seed=0, epoch=epoch).tolist() for epoch in range(4)]
    [[0, 3, 1, 2], [0, 4, 1, 2], [0, 5, 1, 2], [0, 6, 1, 2]]
    >>> mixture
    Mixture(2 datasets of 3 and 4 documents: 66.7% and 33.3% of the tokens, 1 and 0.25 passes per epoch)

    Documents are numbered as in `torch.utils.data.ConcatDataset`:

        mixture = tritonpack.Mixture([lengths_of_one, lengths_of_other], weights=[0.7, 0.3])
        sampler = tritonpack.MultipackDistributedBatchSampler(32768, mixture.lengths, order=mixture)
        loader = DataLoader(ConcatDataset([one, other]), batch_sampler=sampler, ...)

    Args:
        lengths: for each dataset the tokens of its documents, integers of at least 1.
        weights: for each dataset a number above 0. Their sum doesn't matter.
        until: when an epoch ends, with the names of `datasets.interleave_datasets`. "first_exhausted": when the first
            dataset is used up, so no document is in an epoch twice. "all_exhausted": when every dataset is, so the
            others are repeated.
        shuffle: shuffle each dataset, and the documents of an epoch anew. False keeps the order of each dataset.

    Attributes:
        lengths: (documents,) int64, of all datasets, one after the other.
        passes: (datasets,) how often an epoch goes through each dataset.

    Raises:
        ValueError: no datasets, not one weight for each, a weight that isn't above 0, bad lengths, an epoch of more
            documents than fit into int32, an unknown option.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int] | NDArray[Any]],
        weights: Sequence[float],
        *,
        until: Until = "first_exhausted",
        shuffle: bool = True,
    ) -> None:
        if not isinstance(lengths, (list, tuple)) or not lengths:
            raise ValueError(f"lengths must be a list with the lengths of each dataset; got {lengths!r:.100}.")
        if len(weights) != len(lengths):
            raise ValueError(f"{len(lengths)} datasets need as many weights; got {len(weights)}.")
        for weight in weights:
            if not is_number(weight) or not 0 < weight < math.inf:
                raise ValueError(f"weights must be numbers above 0; got {weight!r}. Leave out a dataset of weight 0.")
        self._datasets = [_checked(own, number) for number, own in enumerate(lengths)]
        self._shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
        self._until = check_choice(until, get_args(Until), "until")
        self._shuffle = check_flag(shuffle, "shuffle")
        self.lengths: NDArray[np.int64] = np.concatenate(self._datasets)
        self._totals = [sum(own.tolist()) for own in self._datasets]
        ends = [total / share for total, share in zip(self._totals, self._shares, strict=True)]
        self._epoch_tokens = min(ends) if until == "first_exhausted" else max(ends)
        taken = [self._epoch_tokens * share for share in self._shares]
        self.passes = tuple(float(part / total) for part, total in zip(taken, self._totals, strict=True))
        entries = sum(passes * len(own) for passes, own in zip(self.passes, self._datasets, strict=True))
        if entries > MAX_INT32 or len(self.lengths) > MAX_INT32:
            raise ValueError(
                f"an epoch would have about {entries:,.0f} documents of {len(self.lengths):,}; at most {MAX_INT32:,} "
                "are planned at once. Raise the smallest weights, or pass until='first_exhausted'."
            )

    def __call__(self, seed: int, epoch: int) -> NDArray[np.int32]:
        """The documents of an epoch, (entries,) int32, in the order in which they are trained on.

        Raises:
            ValueError: a seed or an epoch that isn't an integer of at least 0.
        """
        check_integer(seed, "seed", 0, None)
        check_integer(epoch, "epoch", 0, None)
        documents, times = [], []
        first = 0
        for number, (own, share, total) in enumerate(zip(self._datasets, self._shares, self._totals, strict=True)):
            # The dataset is an endless row of passes in one order. This epoch has the documents that begin in these of
            # its tokens, each pass shuffled anew.
            begin = math.ceil(epoch * self._epoch_tokens * share)
            end = math.ceil((epoch + 1) * self._epoch_tokens * share)
            order = shuffled(len(own), seed, number) if self._shuffle else np.arange(len(own))
            starts = np.cumsum(own[order]) - own[order]
            passes = [order[:0]]
            for turn, start in enumerate(range(begin, end, total)):
                low = start % total
                high = low + min(total, end - start)
                one, other, rest = np.searchsorted(starts, [low, min(high, total), max(high - total, 0)])
                chosen = np.concatenate([order[one:other], order[:rest]])
                passes.append(chosen[shuffled(len(chosen), seed, number, epoch, turn)] if self._shuffle else chosen)
            mine = np.concatenate(passes)
            documents.append(first + mine)
            # A document has its turn after these tokens of all datasets.
            times.append((np.cumsum(own[mine]) - own[mine]) / float(share))
            first += len(own)
        by_time = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(documents)[by_time].astype(np.int32)

    def __repr__(self) -> str:
        sizes = _listed(f"{len(own):,}" for own in self._datasets)
        shares = _listed(f"{float(share):.1%}" for share in self._shares)
        passes = _listed(f"{passes:.3g}" for passes in self.passes)
        return (
            f"Mixture({len(self._datasets)} datasets of {sizes} documents: {shares} of the tokens, {passes} passes per "
            "epoch)"
        )


def _checked(lengths: Sequence[int] | NDArray[Any], dataset: int) -> NDArray[np.int64]:
    try:
        return whole_lengths(lengths).astype(np.int64)
    except ValueError as error:
        raise ValueError(f"dataset {dataset} of the mixture: {error}") from None


def _listed(words: Any) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last

"""The order of documents in an epoch: shuffled, that of the dataset, or given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import check_integer

# Document numbers, or a function of a seed and an epoch that returns them. A document may come more than once. Lists
# are taken, too.
Order = NDArray[np.integer] | Callable[[int, int], NDArray[np.integer]]


def epoch_order(
    count: int, seed: int, epoch: int, shuffle: bool = True, order: Order | None = None
) -> NDArray[np.int32]:
    """The document numbers of an epoch: 0 to `count` - 1, shuffled by the seed and the epoch, or those of `order`.

    Raises:
        ValueError: a wrong seed or epoch, an order that isn't numbers of `count` documents.
    """
    seeds = [check_integer(seed, "seed", 0, None), check_integer(epoch, "epoch", 0, None)]
    if order is None:
        if not shuffle:
            return np.arange(count, dtype=np.int32)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))
        return generator.permutation(count).astype(np.int32)
    numbers = order(seed, epoch) if callable(order) and not isinstance(order, type) else order
    numbers = np.asarray(numbers) if isinstance(numbers, (list, tuple, range)) else numbers
    rule = f"order must be a one-dimensional array with numbers of documents, 0 to {count - 1}, or return one"
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"{rule}; got {numbers!r:.100}.")
    outside = (numbers < 0) | (numbers >= count)
    if outside.any():
        raise ValueError(f"{rule}; got {numbers[np.argmax(outside)]}.")
    return numbers.astype(np.int32)

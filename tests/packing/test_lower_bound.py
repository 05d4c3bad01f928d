import math

import numpy as np
import pytest

from tests.packing import naive
from tritonpack.packing.bins import lower_bound


def by_definition(lengths, capacity):
    """The definition of L2 by Martello and Toth, with a sum over all documents for every threshold."""
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [length for length in lengths if length > capacity - threshold]
        large = [length for length in lengths if capacity / 2 < length <= capacity - threshold]
        small = [length for length in lengths if threshold <= length <= capacity / 2]
        excess = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, math.ceil(excess / capacity)))
    return best


@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 11, 100])
def test_equals_definition(capacity):
    rng = np.random.default_rng(capacity)
    for _ in range(40):
        lengths = rng.integers(1, capacity + 1, int(rng.integers(1, 40)))
        assert lower_bound(lengths, capacity) == by_definition(lengths.tolist(), capacity)


@pytest.mark.parametrize("max_items", [None, 1, 2, 3])
def test_bound_is_at_most_the_optimum(max_items):
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(150):
        lengths = rng.integers(1, 21, int(rng.integers(1, 8)))
        bound = lower_bound(lengths, 20, max_items)
        fewest = naive.fewest_bins(lengths.tolist(), 20, max_items or len(lengths))
        assert bound <= fewest
        reached += bound == fewest
    assert reached > 120  # in most cases the bound is the optimum


def test_bound_exceeds_tokens_over_capacity():
    assert lower_bound(np.array([6, 6, 6]), 10) == 3
    assert lower_bound(np.array([1] * 7), 10, max_items=2) == 4


def test_sums_exceed_32_bits():
    assert lower_bound(np.full(10_000, 700_000, dtype=np.int32), 1_000_000) == 10_000
    assert lower_bound(np.full(10_000, 500_000, dtype=np.int32), 1_000_000) == 5_000

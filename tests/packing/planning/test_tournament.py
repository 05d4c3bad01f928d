"""The tree that finds the row with the smallest key."""

import numpy as np
import pytest

pytest.importorskip("numba")

from tritonpack.packing.planning.tournament import UNLIMITED, begin_tournament, num_leaves, set_key


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 21])
def test_finds_the_first_row_with_the_smallest_key(rows):
    rng = np.random.default_rng(rows)
    leaves = num_leaves(rows)
    keys, winners = np.empty(2 * leaves, dtype=np.int64), np.empty(2 * leaves, dtype=np.int64)
    keys[leaves:] = UNLIMITED
    own = keys[leaves : leaves + rows]
    own[:] = rng.integers(0, 4, rows)
    begin_tournament(keys, winners, leaves)
    for _ in range(300):
        assert (winners[1], keys[1]) == (np.argmin(own), own.min())
        key = rng.choice([0, 1, 2, 3, 2**61, UNLIMITED])
        set_key(keys, winners, leaves, int(rng.integers(rows)), int(key))

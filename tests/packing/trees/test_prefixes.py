"""prefix_tree and joined, on sequences of any numbers of 64 bits."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.packing.tries import REPEATABLE, check_tree
from tritonpack.packing.trees.prefixes import joined, prefix_tree

LARGEST = 2**63 - 1
NUMBERS = st.sampled_from([-LARGEST - 1, -1, 0, 1, 2, 256, 65536, 2**32 - 1, 2**32, 2**40, LARGEST])


@REPEATABLE
@given(st.lists(st.lists(NUMBERS, max_size=7), max_size=9))
@example([])
@example([[], [], [1]])
@example([[1, 2, 3], [1, 2], [1], [], [1, 2, 3]])
@example([[2, 1], [1, 2], [2, 1, 1], [1, 2, 2]])  # groups in any order
@example([[1, 2], [256, 2], [1, 3], [256, 3], [65536, 2], [1, 2, 0]])  # bytes that occur in other tokens
def test_each_begin_is_one_token(sequences):
    tokens = np.array([token for row in sequences for token in row], dtype=np.int64)
    tree = prefix_tree(tokens, np.array([len(row) for row in sequences], dtype=np.int64))
    assert tree.sources.dtype == tree.places.dtype == tree.ends.dtype == np.int64
    check_tree(sequences, *(values.tolist() for values in tree))


@REPEATABLE
@given(st.lists(st.lists(st.tuples(st.sampled_from([0, 1]), NUMBERS, NUMBERS), max_size=4), min_size=1, max_size=6))
def test_tokens_are_shared_if_all_channels_are_equal(sequences):
    lengths = np.array([len(row) for row in sequences])
    tokens = np.array([token for row in sequences for token in row], dtype=np.int64).reshape(-1, 3)
    tree = prefix_tree(joined(list(tokens.T)), lengths)
    check_tree(sequences, *(values.tolist() for values in tree))


@pytest.mark.parametrize(
    "channels",
    [
        [[-7, -7, 5, -7], [10**9, 10**9, 0, 10**9 - 1], [2, 2, 2, 2]],
        [[0, 0, 2**62, 0], [0, 2**62, 0, 0], [0, 0, 0, 1]],
        [[-LARGEST - 1, LARGEST, 0, -LARGEST - 1]],
        [[]],
    ],
    ids=str,
)
def test_joined_numbers_are_equal_where_all_channels_are(channels):
    numbers = joined([np.array(channel, dtype=np.int64) for channel in channels])
    tokens = list(zip(*channels, strict=True))
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in tokens] for a in tokens]

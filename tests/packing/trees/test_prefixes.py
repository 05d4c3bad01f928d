import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.tries import REPEATABLE, check_tree
from tritonpack.packing.trees.prefixes import joined, prefix_tree

LARGEST = 2**63 - 1


def end_to_end(sequences):
    tokens = np.array([token for row in sequences for token in row], dtype=np.int64)
    return tokens, np.array([len(row) for row in sequences], dtype=np.int64)


def check(sequences):
    tree = prefix_tree(*end_to_end(sequences))
    assert tree.sources.dtype == tree.places.dtype == tree.ends.dtype == np.int64
    check_tree(sequences, *(values.tolist() for values in tree))
    return tree


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [[]],
        [[], [], [1]],
        [[1, 2, 3]],
        [[1, 2, 3], [1, 2, 3], [1, 2, 3]],
        [[1, 2, 3], [1, 2], [1], []],
        [[1], [1, 2], [], [1, 2, 3]],
        [[1, 2, 3], [1, 2, 4], [1, 5], [6, 2, 3], [6, 2, 4]],
        [[2, 1], [1, 2], [2, 1, 1], [1, 2, 2]],  # groups in any order
        [[1, 2], [256, 2], [1, 3], [256, 3], [65536, 2], [1, 2, 0]],  # bytes that occur in other tokens
        [[0, 2], [2**32, 1], [2**32, 3]],
        [[2**32 - 1, 2], [-1, 1], [-1, 3]],
        [[-1, 2], [LARGEST, 2], [-1, 3], [LARGEST, 3], [2**32 - 1, 2], [2**32, 3], [-1 - LARGEST, 2]],
    ],
    ids=str,
)
def test_trees_of_sequences(sequences):
    check(sequences)


@REPEATABLE
@given(st.lists(st.lists(st.sampled_from([0, 1, 256, 2**40]), max_size=7), max_size=9))
def test_random_sequences(sequences):
    check(sequences)


@REPEATABLE
@given(st.data())
def test_tokens_are_shared_if_all_channels_are_equal(data):
    few, many = st.sampled_from([0, 1]), st.sampled_from([-LARGEST - 1, -1, 0, LARGEST])
    sequences = data.draw(st.lists(st.lists(st.tuples(few, many, many), max_size=4), min_size=1, max_size=6))
    lengths = np.array([len(row) for row in sequences])
    tokens = np.array([token for row in sequences for token in row], dtype=np.int64).reshape(-1, 3)
    tree = prefix_tree(joined(list(tokens.T)), lengths)
    check_tree(sequences, *(values.tolist() for values in tree))


@pytest.mark.parametrize(
    "channels",
    [
        [[3, 3, 4, 3]],
        [[3, 3, 4, 3], [0, 1, 0, 0]],
        [[-7, -7, 5, -7], [10**9, 10**9, 0, 10**9 - 1], [2, 2, 2, 2]],
        [[0, 0, 2**62, 0], [0, 2**62, 0, 0], [0, 0, 0, 1]],
        [[-LARGEST - 1, LARGEST, 0, -LARGEST - 1]],
        [[0, LARGEST, 0, LARGEST]],
        [[]],
    ],
    ids=str,
)
def test_joined_numbers_are_equal_where_all_channels_are(channels):
    numbers = joined([np.array(channel, dtype=np.int64) for channel in channels])
    tokens = list(zip(*channels, strict=True))
    assert numbers.dtype == np.int64
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in tokens] for a in tokens]

"""prefix_tree and joined, on sequences of any numbers of 64 bits."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.packing.tries import REPEATABLE
from tritonpack.packing.trees.prefixes import joined, prefix_tree

LARGEST = 2**63 - 1
NUMBERS = st.sampled_from([-LARGEST - 1, -1, 0, 1, 2, 256, 65536, 2**32 - 1, 2**32, 2**40, LARGEST])


@REPEATABLE
@given(st.lists(st.lists(NUMBERS, max_size=7), max_size=9))
@example([])
@example([[], [], [1]])
@example([[2, 1], [1, 2], [2, 1, 1], [1, 2, 2], []])  # groups in any order
@example([[1, 2], [256, 2], [1, 3], [256, 3], [65536, 2], [1, 2, 0]])  # bytes that occur in other tokens
def test_each_begin_is_one_token(sequences):
    tokens = np.array([token for row in sequences for token in row], dtype=np.int64)
    tree = prefix_tree(tokens, np.array([len(row) for row in sequences], dtype=np.int64))
    assert tree.sources.dtype == tree.places.dtype == tree.ends.dtype == np.int64
    flat = [tuple(row[:stop]) for row in sequences for stop in range(1, len(row) + 1)]
    begins = [flat[source] for source in tree.sources]
    assert sorted(begins) == sorted(set(flat))
    assert [begins[place] for place in tree.places] == flat
    for place, (begin, end) in enumerate(zip(begins, tree.ends.tolist(), strict=True)):
        below = [number for number, other in enumerate(begins) if other[: len(begin)] == begin]
        assert below == list(range(place, end))


@REPEATABLE
@given(st.lists(st.tuples(st.sampled_from([-7, 5, 10**9]), NUMBERS, NUMBERS), max_size=8))
@example([(0, 0, 0), (0, 2**62, 0), (2**62, 0, 0), (0, 0, 1)])
def test_joined_numbers_are_equal_where_all_channels_are(tokens):
    numbers = joined(list(np.array(tokens, dtype=np.int64).reshape(-1, 3).T))
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in tokens] for a in tokens]

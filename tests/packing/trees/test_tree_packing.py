"""pack_trees: rows within the capacity, groups whole where they fit, and as little computed twice as possible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.tries import REPEATABLE
from tritonpack import TreePacking, pack_tree, pack_trees

pytest.importorskip("numba")

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12)


def begins(rows):
    return {tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)}


def rows_of(packing, sequences):
    return [[sequences[number] for number in items] for items in packing]


@REPEATABLE
@given(SEQUENCES, st.integers(5, 12))
def test_rows_hold_every_sequence_once_within_the_capacity(sequences, capacity):
    packing = pack_trees(sequences, capacity)
    assert sorted(packing.items.tolist()) == list(range(len(sequences)))
    assert all((np.diff(items) > 0).all() for items in packing)
    rows = rows_of(packing, sequences)
    assert packing.tokens.tolist() == [len(begins(row)) for row in rows]
    assert max(packing.tokens) <= capacity
    assert packing.tokens_given == sum(map(len, sequences))
    assert packing.tokens_lost == packing.num_tokens - len(begins(sequences))
    assert packing.efficiency == pytest.approx(packing.num_tokens / capacity / len(rows))


@REPEATABLE
@given(SEQUENCES, st.integers(5, 12))
def test_sequences_with_a_common_begin_are_split_only_where_they_exceed_the_capacity(sequences, capacity):
    """At every depth: a subtree that fits into a row with the tokens before it lies in one row."""
    rows = rows_of(pack_trees(sequences, capacity), sequences)
    for begin in begins(sequences):
        group = [row for row in sequences if tuple(row[: len(begin)]) == begin]
        if len(begins(group)) <= capacity:
            assert sum(begin in begins(row) for row in rows) == 1


def test_a_begin_of_all_sequences_stands_once_in_each_row():
    """A system prompt of 10 tokens, 12 prompts of 5 and two completions of 5 for each: 15 tokens beside the 10."""
    sequences = [[0] * 10 + [prompt] * 5 + [100 + completion] * 5 for completion in range(2) for prompt in range(1, 13)]
    packing = pack_trees(sequences, 10 + 4 * 15)
    assert packing.tokens.tolist() == [70, 70, 70]
    assert packing.tokens_lost == 20
    for items in packing:
        assert len({number % 12 for number in items.tolist()}) == 4  # both completions of four prompts


def test_rows_become_batches():
    sequences = [[1, 2, 3], [4, 5], [1, 2, 6], [4, 6], [1, 2, 3]]
    packing = pack_trees(sequences, 4)
    assert isinstance(packing, TreePacking)
    assert [items.tolist() for items in packing] == [[0, 2, 4], [1, 3]]
    batch = pack_tree([sequences[i] for i in packing[0]])
    assert batch.num_tokens == packing.tokens[0] == 4
    assert repr(packing) == (
        "TreePacking(5 sequences in 2 rows of 4 tokens: 13 tokens given, 7 computed, 0 more than without splits)"
    )
    with pytest.raises(IndexError, match="bin 2 of a packing with 2 bins"):
        packing[2]

"""Units: what they take, which of them fit, and what is said of those that don't."""

import numpy as np
import pytest

from tritonpack import Units, pack, pack_tree
from tritonpack.packing import fit_lengths


def random_groups(seed, count=40):
    """Groups of sequences that begin alike: equal ones, begins of others, several branches, single tokens."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(count):
        prompt = rng.integers(0, 3, rng.integers(0, 9)).tolist()
        group = [prompt + rng.integers(0, 3, rng.integers(1, 7)).tolist() for _ in range(rng.integers(1, 6))]
        groups.append([*group, group[0][: rng.integers(1, len(group[0]) + 1)]] if rng.random() < 0.5 else group)
    return groups


@pytest.mark.parametrize("seed", range(3))
def test_trees_count_the_pairs_of_the_dense_mask(seed):
    groups = random_groups(seed)
    units = Units.of_trees(groups)
    for unit, group in enumerate(groups):
        batch = pack_tree(group)
        pairs = int(batch.mask.to_dense().sum())
        assert units.tokens[unit] == batch.num_tokens
        assert units.squares[unit] == 2 * pairs - batch.num_tokens


def test_sequences_count_the_pairs_of_the_dense_mask():
    units = Units.of_trees([[[5, 6, 7]], [[1, 2], [3, 4, 5]]])  # nothing in common
    same = Units.of_sequences([[3], [2, 3]])
    assert units.tokens.tolist() == same.tokens.tolist() == [3, 5]
    assert units.squares.tolist() == same.squares.tolist() == [9, 13]


def test_units_that_do_not_fit_are_named_so():
    units = Units.of_sequences([[5], [4, 4], [3]])
    fitted = fit_lengths(units.tokens, 7, "drop", noun=units.noun)
    assert fitted.documents.tolist() == [0, 2]
    assert str(fitted.report) == "1 unit longer than the capacity dropped: 8 tokens lost"
    assert str(fit_lengths(units.tokens, 8, noun=units.noun).report) == "every unit fits"


def test_units_of_tokens_alone_are_packed():
    units = Units.of_sequences([[5], [2, 1], [4], [1, 1]])
    packing, same = pack(units, 8), pack([5, 3, 4, 2], 8)
    assert [items.tolist() for items in packing] == [items.tolist() for items in same]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(Units.of_documents([9]), 8, overlong="split"), "overlong='split' cuts documents"),
        (lambda: Units.of_documents([2**31]), "at most 2147483647 tokens; number 0 has 2147483648"),
        (lambda: Units.of_sequences([[1], []]), "unit 1: lengths is empty"),
        (lambda: Units.of_sequences([[1], [2, 0]]), "unit 1: .*document 1 has length 0"),
        (lambda: Units([5, 6], [25, 37]), "unit 1 has 6 tokens and squares 37"),
        (lambda: Units([5, 6], [25, 5]), "unit 1 has 6 tokens and squares 5"),
        (lambda: Units.of_trees([[[1]], []]), "unit 1, a list of sequences of token ids: sequences is empty"),
        (lambda: Units.of_trees([[[1]], [[1], []]]), "unit 1, .*: sequence 1 is empty"),
        (lambda: Units.of_trees([[[0.5]]]), "unit 0, .*: sequence 0 needs a row of integers"),
        (lambda: Units.of_trees([5, 6]), "unit 0, .*: sequences must be a list .*; got int 5"),
        (lambda: Units.of_trees([[5, 6]]), r"unit 0, .*: sequence 0 needs a row of integers .*shape \(\)"),
    ],
)  # fmt: skip
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Units: what they take, which of them fit, and what is said of those that don't."""

import numpy as np
import pytest

from tritonpack import Units, pack, pack_tree
from tritonpack.packing.units import fit_units


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


def test_resources_may_be_any_rows_of_integers():
    units = Units.of_trees([[[1]], [[2, 3]]], patches=[4, 0], frames=np.array([0, 7], dtype=np.uint8))
    assert {name: row.tolist() for name, row in units.resources.items()} == {"patches": [4, 0], "frames": [0, 7]}
    picked = units.select([1])
    assert (picked.tokens.tolist(), picked.resources["frames"].tolist()) == ([2], [7])


PAIRS = Units.of_documents([5, 8, 3], patches=[9, 0, 4])


def test_fitting_leaves_out_what_exceeds_any_budget():
    fitted = fit_units(PAIRS, 8, {"patches": 4}, "drop")
    assert fitted.documents.tolist() == [1, 2]
    assert (fitted.report.documents, fitted.report.tokens_lost) == (1, 5)
    fitted = fit_units(PAIRS, 4, {"patches": 9}, "drop")
    assert (fitted.documents.tolist(), fitted.units.resources["patches"].tolist()) == ([2], [4])
    assert str(fitted.report) == "2 units that take more than a row has dropped: 13 tokens lost"
    whole = fit_units(PAIRS, 8, {"patches": 9}, "drop")
    assert (whole.documents, str(whole.report)) == (None, "every unit fits")


def test_units_of_tokens_alone_are_packed():
    units = Units.of_sequences([[5], [2, 1], [4], [1, 1]])
    packing, same = pack(units, 8), pack([5, 3, 4, 2], 8)
    assert [items.tolist() for items in packing] == [items.tolist() for items in same]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_units(PAIRS, 8, {"patches": 8}), "1 of 3 .*0 takes 9 patches, and the budget of patches is 8"),
        (lambda: fit_units(PAIRS, 7, {"patches": 9}), "document 1 takes 8 tokens, and the capacity is 7"),
        (lambda: fit_units(PAIRS, 2, {"patches": 9}, "drop"), r"leaves nothing: each of 3 .*\(2 tokens, 9 patches\)"),
        (lambda: fit_units(PAIRS, 8), "resource 'patches', and budgets={} doesn't say how much of it a row holds"),
        (lambda: fit_units(PAIRS, 8, {"patches": 9, "frames": 1}), "'frames', which isn't .* .'patches'."),
        (lambda: fit_units([5, 3], 8, {"frames": 1}), r"'frames', which isn't a resource of the units \(none\)"),
        (lambda: fit_units(PAIRS, 8, {"patches": 2**31}), "budget of patches must be an integer from 0 to 1073741824"),
        (lambda: fit_units(PAIRS, 8, {"patches": 2.5}), "the budget of patches must be an integer"),
        (lambda: fit_units(PAIRS, 8, 9), "budgets must be a mapping .* got 9"),
        (lambda: fit_units(PAIRS, 8, {"patches": 9}, "split"), "overlong must be one of 'error', 'drop'"),
        (lambda: pack(PAIRS, 8), "the units have the resources patches. .*plan_epoch plans them"),
        (lambda: pack(Units.of_documents([9]), 8, overlong="split"), "overlong='split' cuts documents"),
        (lambda: Units.of_documents([5], tokens=[5]), "tokens aren't one of the resources"),
        (lambda: Units.of_documents([5, 6], patches=[1]), "resource 'patches' must be 2 integers"),
        (lambda: Units.of_documents([5, 6], patches=[1, -1]), "unit 1 has -1"),
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

"""pack: bins of every algorithm, the lower bound, documents that are too long; windows; units; refusals."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing import naive
from tests.packing.lengths import openchat
from tritonpack import Units, pack, pack_tree
from tritonpack.packing import fit_lengths, plan_epoch
from tritonpack.packing.bins import ALGORITHMS, lower_bound
from tritonpack.packing.heuristics import MAX_CARRIES, longest_first, pack_window, sort_by_bytes
from tritonpack.packing.planning.tail import whole_rounds


def bins_of(packing):
    return [items.tolist() for items in packing]


@st.composite
def problems(draw):
    """Lengths, many different ones or three, a capacity around sizes of the tree of rooms, a limit of documents."""
    capacity = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 100, 4095, 4096, 4097]))
    count, longest = draw(st.integers(1, 120)), draw(st.integers(1, capacity))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths = rng.integers(1, longest + 1, count)
    lengths = rng.choice(lengths[:3], count) if draw(st.booleans()) else lengths
    return lengths, capacity, draw(st.sampled_from([None, 1, 3, 8]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(problem=problems())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_bins_are_those_of_plain_loops(algorithm, problem):
    lengths, capacity, max_items = problem
    packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items)
    assert bins_of(packing) == getattr(naive, algorithm)(lengths.tolist(), capacity, max_items or len(lengths))
    assert packing.lengths.tolist() == lengths[packing.items].tolist()
    assert packing.num_bins == len(packing) >= packing.lower_bound >= math.ceil(lengths.sum() / capacity)
    assert packing.efficiency == lengths.sum() / (len(packing) * capacity)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_split_keeps_each_token_once(algorithm):
    lengths = np.random.default_rng(0).integers(1, 400, 3000)
    for max_items in (None, 3):
        packing = pack(lengths, 64, overlong="split", algorithm=algorithm, max_items=max_items)
        spans = [packing.spans(number) for number in range(packing.num_bins)]
        assert max(sum(stop - start for _, start, stop in each) for each in spans) <= 64
        assert max(map(len, spans)) <= (max_items or 64)
        tokens = np.concatenate([np.arange(start, stop) + 400 * item for each in spans for item, start, stop in each])
        expected = np.concatenate([np.arange(length) + 400 * number for number, length in enumerate(lengths)])
        assert np.array_equal(np.sort(tokens), expected)
    assert repr(packing).startswith(f"Packing({len(packing.items)} documents and pieces of documents in")
    packing = pack(np.full(5_000, 1_000_000, dtype=np.int32), capacity=1_000_000, algorithm=algorithm)
    assert (packing.num_tokens, packing.efficiency) == (5_000_000_000, 1.0), "sums exceed 32 bits"


SPANS = {  # of lengths 5, 20, 3, 8, 9 in bins of 8
    "truncate": ([[(0, 0, 5)], [(1, 0, 8)], [(2, 0, 3)], [(3, 0, 8)], [(4, 0, 8)]], 13, 2),
    "split": (
        [[(0, 0, 5)], [(1, 0, 8)], [(1, 8, 16)], [(1, 16, 20), (2, 0, 3)], [(3, 0, 8)], [(4, 0, 8)], [(4, 8, 9)]], 0, 5,
    ),
    "drop": ([[(0, 0, 5), (2, 0, 3)], [(3, 0, 8)]], 29, 0),
}  # fmt: skip


@pytest.mark.parametrize("overlong", SPANS)
def test_documents_longer_than_a_bin(overlong):
    packing = pack((5, 20, 3, 8, 9), 8, overlong=overlong, algorithm="next_fit")
    spans, lost, pieces = SPANS[overlong]
    assert [packing.spans(b) for b in range(packing.num_bins)] == spans
    assert (packing.report.documents, packing.report.tokens_lost, packing.report.pieces) == (2, lost, pieces)
    assert packing.num_tokens == 45 - lost
    assert str(pack([5], 8).report) == "every document fits"


def test_bins_by_number_and_read_only_lengths():
    packing = pack([8, 3, 5], capacity=8)
    assert (packing[0].tolist(), packing[-1].tolist(), packing.spans(-1)) == ([0], [2, 1], [(2, 0, 5), (1, 0, 3)])
    assert repr(packing) == "Packing(3 documents in 2 bins of 8 tokens, efficiency 100.00%)"
    for ask in (packing.__getitem__, packing.spans):
        with pytest.raises(IndexError, match="bin 2 of a packing with 2 bins"):
            ask(2)
    lengths, compiled = np.array([5, 3], dtype=np.int32), len(longest_first.signatures)
    lengths.flags.writeable = False  # as arrow's; numba would compile every loop again for them
    assert bins_of(pack(lengths, 8)) == [[0, 1]]
    assert len(longest_first.signatures) == compiled


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


def test_lower_bound():
    rng, reached = np.random.default_rng(0), 0
    for round_ in range(200):
        capacity = [1, 2, 3, 10, 11, 100][round_ % 6]
        lengths = rng.integers(1, capacity + 1, int(rng.integers(1, 40)))
        assert lower_bound(lengths, capacity) == by_definition(lengths.tolist(), capacity)
        lengths, max_items = rng.integers(1, 21, int(rng.integers(1, 8))), [None, 1, 2, 3][round_ % 4]
        fewest = naive.fewest_bins(lengths.tolist(), 20, max_items or len(lengths))
        assert lower_bound(lengths, 20, max_items) <= fewest
        reached += lower_bound(lengths, 20, max_items) == fewest
    assert reached > 160, "in most cases the bound is the optimum"
    for capacity in (2048, 8192, 32768):
        packing = pack(openchat(), capacity)
        assert packing.num_bins <= max(1.003 * packing.lower_bound, packing.lower_bound + 1)


NONE = np.zeros((3, 0), dtype=np.int64)


def windows_of(lengths, window, capacity, max_items):
    carried, bins = NONE, []
    for start in range(0, len(lengths), window):
        own, last = lengths[start : start + window], start + window >= len(lengths)
        documents, offsets, carried = pack_window(carried, own, start, capacity, max_items, last)
        bins += [part.tolist() for part in np.split(documents, offsets[1:-1]) if len(part)]
    return bins


@pytest.mark.parametrize("window", [1, 7, 50])
def test_windows_are_those_of_plain_loops(window):
    lengths = np.random.default_rng(window).integers(1, 64, 200)
    for max_items in (200, 2):
        assert windows_of(lengths, window, 64, max_items) == naive.windowed(lengths.tolist(), 64, max_items, window)
    assert [each.tolist() for each in pack_window(NONE, NONE[0], 0, 100, 10, True)[:2]] == [[], [0]]
    lengths = np.random.default_rng(0).integers(1, 2049, 400 * window)
    items = np.concatenate(windows_of(lengths, window, 4096, 400))
    assert (np.maximum.accumulate(items) - items).max() < (MAX_CARRIES + 1) * window, "documents wait for few windows"


@pytest.mark.parametrize("count", [0, 47, 48, 300])
def test_sorts_keys(count):
    for most in (0, 255, 256, 70_000):
        keys = np.random.default_rng(count).integers(0, most + 1, count) << 16 | np.arange(count)
        expected = [*sorted(keys.tolist()), -1, -2]
        keys = np.append(keys, [-1, -2])
        sort_by_bytes(keys, np.empty(count, dtype=np.int64), np.empty(257, dtype=np.int64), count, 16, most)
        assert keys.tolist() == expected


def test_fullest_bins_of_a_stream_are_halved():
    lengths = {length: (None, length) for length in range(10)}
    assert whole_rounds([[1, 2, 3], [4, 5]], lengths, 3) == [[1, 2, 3], [4], [5]], "4 + 5 is the fullest"
    assert whole_rounds([[1, 2, 3], [4, 5]], lengths, 4) == [[1, 2], [3], [4], [5]], "1 + 2 and 3 are halves"
    assert whole_rounds([[9], [2, 2]], lengths, 3) == [[9], [2], [2]], "the fullest holds one entry"


@pytest.mark.parametrize("seed", range(3))
def test_units_count_the_pairs_of_the_dense_mask(seed):
    """Groups of sequences that begin alike: equal ones, begins of others, several branches, single tokens."""
    rng, groups = np.random.default_rng(seed), []
    for _ in range(40):
        prompt = rng.integers(0, 3, rng.integers(0, 9)).tolist()
        group = [prompt + rng.integers(0, 3, rng.integers(1, 7)).tolist() for _ in range(rng.integers(1, 6))]
        groups.append([*group, group[0][: rng.integers(1, len(group[0]) + 1)]] if rng.random() < 0.5 else group)
    units = Units.of_trees(groups)
    for unit, group in enumerate(groups):
        batch = pack_tree(group)
        assert units.tokens[unit] == batch.num_tokens
        assert units.squares[unit] == 2 * int(batch.mask.to_dense().sum()) - batch.num_tokens
    units, same = Units.of_trees([[[5, 6, 7]], [[1, 2], [3, 4, 5]]]), Units.of_sequences([[3], [2, 3]])
    assert units.tokens.tolist() == same.tokens.tolist() == [3, 5]
    assert units.squares.tolist() == same.squares.tolist() == [9, 13]
    fitted = fit_lengths(same.tokens, 4, "drop", noun=same.noun)
    assert fitted.documents.tolist() == [0]
    assert str(fitted.report) == "1 unit longer than the capacity dropped: 5 tokens lost"


REFUSED = [
    (pack, ([4, 9, 12], 8), "2 of 3 documents are longer than .* 8 .*document 1, 9 tokens.*at least 12.*overlong="),
    (pack, ([], 8), "lengths is empty"),
    (pack, ([4, -3], 8), "document 1 has length -3"),
    (pack, ([4.0, 2.0], 8), "lengths must be a row of integers.*float64"),
    (pack, ([[1, 2], [3]], 8), r"lengths must be a row of integers, .* got \[\[1, 2\], \[3\]\]. Count .*len\(ids\)"),
    (pack, ([4.0, float("nan")], 8), r"a length is missing \(NaN\), measure it"),
    (pack, ([True, True], 8), "lengths must be a row of integers.*bool"),
    (pack, ([[1, 2]], 8), r"shape \(1, 2\)"),
    (pack, ([2**40], 8), "longer than the capacity"),
    *((pack, ([1], bad), f"capacity must be an integer from 1 to 2147483647; got {bad}") for bad in (0, 8.0, True)),
    (Units, ([2**31], [2**62]), "at most 2147483647 tokens; number 0 has 2147483648"),
    (Units.of_sequences, ([[1], []],), "unit 1: lengths is empty"),
    (Units.of_sequences, ([],), "lengths is empty"),
    (Units.of_sequences, (None,), "a list with a list of lengths for each unit; got None"),
    (Units.of_trees, (None,), "a list with a list of sequences for each unit; got None"),
    (Units.of_trees, ([],), "lengths is empty"),
    (plan_epoch, ([2**40, 1, 2], 8, 1), "lengths must be at most 2147483647 tokens; number 0 has 1099511627776. Cut"),
    (pack, (Units([5], [25]), 8), "Of Units pass units.tokens"),
    (Units, ([5, 6], [25, 37]), "unit 1 has 6 tokens and squares 37"),
    (Units, ([5, 6], [25, 5]), "unit 1 has 6 tokens and squares 5"),
    (Units, ([5, 6], [25]), "squares must be 2 integers, the sums .* of each unit; got int64 of shape"),
    (Units, ([5], [25.0]), "squares must be 1 integers, .*; got float64"),
    (Units.of_trees, ([[[1]], [[1], []]],), "unit 1, a list of sequences of token ids: sequence 1 is empty"),
    (Units.of_trees, ([5, 6],), "unit 0, .*: sequences must be a list .*; got int 5"),
    (partial(pack, max_items=0), ([9], 8), "max_items must be an integer from 1 .*got 0"),
    (
        partial(pack, overlong="cut"),
        ([9], 8),
        "overlong must be one of 'error', 'truncate', .*; got 'cut'",
    ),
    (partial(pack, overlong="drop"), ([9], 8), "leaves nothing: no document fits"),
    (partial(pack, algorithm="ffd"), ([9], 8), "algorithm must be one of 'best_fit_decreasing', .*; got 'ffd'"),
]


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_refuses(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)

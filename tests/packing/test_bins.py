"""pack: bins of every algorithm, the lower bound, documents that are too long; windows; units; refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing import naive
from tests.packing.lengths import openchat
from tritonpack import Units, pack, pack_tree
from tritonpack.packing import fit_lengths
from tritonpack.packing.bins import ALGORITHMS, lower_bound
from tritonpack.packing.heuristics import MAX_CARRIES, longest_first, pack_window, sort_by_bytes
from tritonpack.packing.stream import _whole_rounds

REPEATABLE = settings(max_examples=80, deadline=None, derandomize=True)


def bins_of(packing):
    return [items.tolist() for items in packing]


@st.composite
def problems(draw):
    """Lengths, many different ones or three, a capacity around sizes of the tree of rooms, a limit of documents."""
    capacity = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 100, 4095, 4096, 4097]))
    count, longest = draw(st.integers(1, 120)), draw(st.integers(1, capacity))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths = rng.integers(1, longest + 1, count)
    return (
        rng.choice(lengths[:3], count) if draw(st.booleans()) else lengths,
        capacity,
        draw(st.sampled_from([None, 1, 3, 8])),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(problem=problems())
@REPEATABLE
def test_bins_are_those_of_plain_loops(algorithm, problem):
    lengths, capacity, max_items = problem
    packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items)
    assert bins_of(packing) == getattr(naive, algorithm)(lengths.tolist(), capacity, max_items or len(lengths))
    assert packing.lengths.tolist() == lengths[packing.items].tolist()
    assert not packing.starts.any()
    assert packing.num_bins == len(packing) >= packing.lower_bound >= math.ceil(lengths.sum() / capacity)
    assert (
        packing.efficiency
        == packing.num_tokens / (packing.num_bins * capacity)
        == lengths.sum() / (len(packing) * capacity)
    )


@pytest.mark.parametrize("capacity", [2048, 4096, 8192, 32768])
def test_number_of_bins_is_near_lower_bound(capacity):
    packing = pack(openchat(), capacity)
    assert packing.num_bins <= max(1.003 * packing.lower_bound, packing.lower_bound + 1)


def test_sums_exceed_32_bits():
    for algorithm in ALGORITHMS:
        packing = pack(np.full(5_000, 1_000_000, dtype=np.int32), capacity=1_000_000, algorithm=algorithm)
        assert (packing.num_tokens, packing.num_bins, packing.efficiency) == (5_000_000_000, 5_000, 1.0)
    assert bins_of(pack([2**31 - 2, 1, 1], 2**31 - 1, algorithm="next_fit")) == [[0, 1], [2]]


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_split_keeps_each_token_once_in_more_than_two_windows(algorithm):
    lengths = np.random.default_rng(0).integers(1, 400, 3000)
    for max_items in (None, 3):
        packing = pack(lengths, 64, overlong="split", algorithm=algorithm, max_items=max_items)
        spans = [packing.spans(number) for number in range(packing.num_bins)]
        assert max(sum(stop - start for _, start, stop in each) for each in spans) <= 64
        assert max(map(len, spans)) <= (max_items or 64)
        entries = [entry for each in spans for entry in each]
        tokens = np.concatenate([np.arange(start, stop) + 400 * number for number, start, stop in entries])
        expected = np.concatenate([np.arange(length) + 400 * number for number, length in enumerate(lengths)])
        assert np.array_equal(np.sort(tokens), expected)
    assert repr(packing).startswith(f"Packing({len(packing.items)} documents and pieces of documents in")


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


NONE = np.zeros((3, 0), dtype=np.int64)


@pytest.mark.parametrize("window", [1, 2, 7, 50])
def test_windows_are_those_of_plain_loops(window):
    lengths = np.random.default_rng(window).integers(1, 64, 200)
    for max_items in (200, 3):
        carried, bins = NONE, []
        for start in range(0, len(lengths), window):
            own, last = lengths[start : start + window], start + window >= len(lengths)
            documents, offsets, carried = pack_window(carried, own, start, 64, max_items, last)
            bins += [part.tolist() for part in np.split(documents, offsets[1:-1]) if len(part)]
        assert bins == naive.windowed(lengths.tolist(), 64, max_items, window)


def test_documents_wait_for_few_windows():
    assert [each.tolist() for each in pack_window(NONE, NONE[0], 0, 100, 10, True)[:2]] == [[], [0]]
    lengths, carried, bins = np.random.default_rng(0).integers(1, 2049, 20 * 1024), NONE, []
    for start in range(0, len(lengths), 1024):
        window = lengths[start : start + 1024]
        items, offsets, carried = pack_window(carried, window, start, 4096, 1024, start + 1024 == len(lengths))
        bins += np.split(items, offsets[1:-1])
    assert len(bins) <= 1.005 * pack(lengths, 4096).num_bins
    items = np.concatenate(bins)
    assert (np.maximum.accumulate(items) - items).max() < (MAX_CARRIES + 1) * 1024


@pytest.mark.parametrize("count", [0, 1, 47, 48, 300])
@pytest.mark.parametrize("most", [0, 1, 255, 256, 70_000])
def test_sorts_keys(count, most):
    keys = np.random.default_rng(count).integers(0, most + 1, count) << 16 | np.arange(count)
    expected, rest = sorted(keys.tolist()), [-1, -2]
    keys = np.append(keys, rest)
    sort_by_bytes(keys, np.empty(count, dtype=np.int64), np.empty(257, dtype=np.int64), count, 16, most)
    assert keys.tolist() == expected + rest


@pytest.mark.parametrize(
    ("bins", "ranks", "expected"),
    [
        ([[1, 2, 3], [4, 5]], 2, [[1, 2, 3], [4, 5]]),
        ([[1, 2, 3], [4, 5]], 3, [[1, 2, 3], [4], [5]]),  # 4 + 5 is the fullest
        ([[1, 2, 3], [4, 5]], 4, [[1, 2], [3], [4], [5]]),  # 1 + 2 and 3 are halves
        ([[8, 1, 1, 1]], 2, [[8], [1, 1, 1]]),
        ([[9], [2, 2]], 3, [[9], [2], [2]]),  # the fullest holds one entry
        ([[1, 1, 1]], 3, [[1], [1], [1]]),
    ],
)
def test_fullest_bins_of_a_stream_are_halved(bins, ranks, expected):
    assert _whole_rounds(bins, {length: (None, length) for length in range(10)}, ranks) == expected


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
    assert (fitted.documents.tolist(), str(fitted.report)) == (
        [0],
        "1 unit longer than the capacity dropped: 5 tokens lost",
    )


NAMES = "'best_fit_decreasing', 'best_fit', 'next_fit'"
REFUSED = [
    (([4, 9, 12], 8), {}, "2 of 3 documents are longer than .* 8 .*document 1, 9 tokens.*at least 12.*overlong="),
    (([9], 8), {"overlong": "drop"}, "leaves nothing: no document fits"),
    (([], 8), {}, "lengths is empty"),
    (([4, 0], 8), {}, "document 1 has length 0"),
    (([4, -3], 8), {}, "document 1 has length -3"),
    (([4.0, 2.0], 8), {}, "lengths must be a row of integers.*float64"),
    (([[1, 2], [3]], 8), {}, r"lengths must be a row of integers, .* got \[\[1, 2\], \[3\]\]. Count .*len\(ids\)"),
    (([4.0, float("nan")], 8), {}, r"a length is missing \(NaN\), measure it"),
    (([True, True], 8), {}, "lengths must be a row of integers.*bool"),
    (([[1, 2]], 8), {}, r"shape \(1, 2\)"),
    (([2**40], 8), {}, "longer than the capacity"),
    *(
        (([1], value), {}, f"capacity must be an integer from 1 to 2147483647; got {value}")
        for value in (0, 8.0, True, 2**31)
    ),
    (([1], 8), {"max_items": 0}, "max_items must be an integer from 1 .*got 0"),
    (([1], 8), {"max_items": 1.5}, "max_items must be .*got 1.5"),
    (([1], 8), {"overlong": "cut"}, "overlong must be one of 'error', 'truncate', 'split', 'drop'; got 'cut'"),
    (([1], 8), {"algorithm": "ffd"}, f"algorithm must be one of {NAMES}; got 'ffd'"),
]
REFUSED_UNITS = [
    (Units, ([2**31], [2**62]), "at most 2147483647 tokens; number 0 has 2147483648"),
    (Units.of_sequences, ([[1], []],), "unit 1: lengths is empty"),
    (Units.of_sequences, ([[1], [2, 0]],), "unit 1: .*document 1 has length 0"),
    (Units, ([5, 6], [25, 37]), "unit 1 has 6 tokens and squares 37"),
    (Units, ([5, 6], [25, 5]), "unit 1 has 6 tokens and squares 5"),
    (Units, ([5, 6], [25]), "squares must be 2 integers, the sums .* of each unit; got int64 of shape"),
    (Units, ([5], [25.0]), "squares must be 1 integers, .*; got float64"),
    (Units.of_trees, ([[[1]], []],), "unit 1, a list of sequences of token ids: got 0 sequences"),
    (Units.of_trees, ([[[1]], [[1], []]],), "unit 1, .*: sequence 1 is empty"),
    (Units.of_trees, ([[[0.5]]],), "unit 0, .*: sequence 0 needs a row of integers"),
    (Units.of_trees, ([5, 6],), "unit 0, .*: sequences must be a list .*; got int 5"),
    (Units.of_trees, ([[5, 6]],), r"unit 0, .*: sequence 0 needs a row of integers .*shape \(\)"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "options", "message"),
    [*((pack, *case) for case in REFUSED), *((call, given_, {}, text) for call, given_, text in REFUSED_UNITS)],
)
def test_refuses(call, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)

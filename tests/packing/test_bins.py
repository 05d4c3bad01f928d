import math
import subprocess
import sys

import numpy as np
import pytest

from tests.packing import naive
from tests.packing.lengths import openchat
from tritonpack.packing import pack
from tritonpack.packing.bins import ALGORITHMS


def draw_lengths(rng, capacity, most=120):
    """Random lengths: many different ones, or three different ones."""
    count = int(rng.integers(1, most))
    longest = int(rng.integers(1, capacity + 1))
    if rng.random() < 0.5:
        return rng.choice(rng.integers(1, longest + 1, 3), count)
    return rng.integers(1, longest + 1, count)


def bins_of(packing):
    return [items.tolist() for items in packing]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("capacity", [1, 2, 7, 63, 64, 65, 100, 4095, 4096, 4097, 5000])
def test_equals_naive_loop(capacity, algorithm):
    rng = np.random.default_rng(capacity)
    for round_ in range(16):
        lengths = draw_lengths(rng, capacity)
        max_items = None if round_ % 2 else int(rng.integers(1, 9))
        packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items)
        expected = getattr(naive, algorithm)(lengths.tolist(), capacity, max_items or len(lengths))
        assert bins_of(packing) == expected
        assert packing.lengths.tolist() == lengths[packing.items].tolist()
        assert not packing.starts.any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("max_items", [None, 3])
@pytest.mark.parametrize("capacity", [64**2 - 1, 64**2, 64**3 - 1, 64**3, 64**3 + 1])
def test_each_document_once_and_no_bin_above_limits(capacity, max_items, algorithm):
    """Capacities around powers of two, where the tree of rooms grows; more documents than two windows."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, capacity + 1, 1500), rng.integers(1, 9, 1500), [capacity, 1]])
    rng.shuffle(lengths)
    packing = pack(lengths, capacity, algorithm=algorithm, max_items=max_items)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    loads = [int(lengths[items].sum()) for items in packing]
    assert max(loads) <= capacity
    assert max(map(len, packing)) <= (max_items or len(lengths))
    assert packing.num_bins == len(loads) >= packing.lower_bound >= math.ceil(lengths.sum() / capacity)


def test_efficiency_is_tokens_over_capacity():
    packing = pack([6, 4, 5], capacity=10)
    assert packing.num_bins == len(packing) == 2
    assert packing.num_tokens == 15
    assert packing.efficiency == 0.75
    assert repr(packing) == "Packing(3 documents in 2 bins of 10 tokens, efficiency 75.00%)"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_token_sums_exceed_32_bits(algorithm):
    packing = pack(np.full(5_000, 1_000_000, dtype=np.int32), capacity=1_000_000, algorithm=algorithm)
    assert packing.num_tokens == 5_000_000_000
    assert packing.num_bins == packing.lower_bound == 5_000
    assert packing.efficiency == 1.0


def test_capacity_may_be_largest_int32():
    """Only for the algorithm whose memory doesn't grow with the capacity."""
    packing = pack([2**31 - 2, 1, 1], 2**31 - 1, algorithm="next_fit")
    assert bins_of(packing) == [[0, 1], [2]]


def test_index_bins():
    packing = pack([8, 3, 5], capacity=8)
    assert packing[0].tolist() == [0]
    assert packing[-1].tolist() == [2, 1]
    assert packing.spans(-1) == [(2, 0, 5), (1, 0, 3)]
    for ask in (packing.__getitem__, packing.spans):
        with pytest.raises(IndexError, match="bin 2 of a packing with 2 bins"):
            ask(2)


class TestOverlong:
    LENGTHS = (5, 20, 3, 8, 9)

    def pack(self, overlong, algorithm="next_fit"):
        return pack(self.LENGTHS, 8, overlong=overlong, algorithm=algorithm)

    def test_truncate(self):
        packing = self.pack("truncate")
        assert [packing.spans(b) for b in range(5)] == [[(0, 0, 5)], [(1, 0, 8)], [(2, 0, 3)], [(3, 0, 8)], [(4, 0, 8)]]
        assert packing.num_tokens == 32
        assert (packing.report.documents, packing.report.tokens_lost, packing.report.pieces) == (2, 13, 2)

    def test_split(self):
        packing = self.pack("split")
        assert [packing.spans(b) for b in range(packing.num_bins)] == [
            [(0, 0, 5)],
            [(1, 0, 8)],
            [(1, 8, 16)],
            [(1, 16, 20), (2, 0, 3)],
            [(3, 0, 8)],
            [(4, 0, 8)],
            [(4, 8, 9)],
        ]
        assert packing.num_tokens == sum(self.LENGTHS)
        assert repr(packing).startswith("Packing(8 documents and pieces of documents in 7 bins")

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_split_keeps_each_token_once(self, algorithm):
        lengths = np.random.default_rng(0).integers(1, 400, 3000)
        packing = pack(lengths, 64, overlong="split", algorithm=algorithm)
        seen = [np.zeros(length, dtype=int) for length in lengths]
        for bin_index in range(packing.num_bins):
            spans = packing.spans(bin_index)
            assert sum(stop - start for _, start, stop in spans) <= 64
            for document, start, stop in spans:
                seen[document][start:stop] += 1
        assert (np.concatenate(seen) == 1).all()

    def test_drop(self):
        packing = self.pack("drop", "best_fit_decreasing")
        assert [packing.spans(b) for b in range(2)] == [[(3, 0, 8)], [(0, 0, 5), (2, 0, 3)]]
        assert packing.report.tokens_lost == 29
        with pytest.raises(ValueError, match=r"leaves nothing: the document is longer"):
            pack([9], 8, overlong="drop")


def test_read_only_lengths_need_no_other_compilation():
    """arrow returns read-only arrays. numba would compile every loop again for them."""
    from tritonpack.packing.heuristics import longest_first

    lengths = np.array([5, 3], dtype=np.int32)
    pack(lengths, 8)
    compiled = len(longest_first.signatures)
    lengths.flags.writeable = False
    assert bins_of(pack(lengths, 8)) == [[0, 1]]
    assert len(longest_first.signatures) == compiled


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "message"),
    [
        (
            [4, 9, 12],
            8,
            {},
            "2 of 3 documents are longer than .* 8 .*document 1, 9 tokens.*at least 12.*overlong=",
        ),
        ([], 8, {}, "lengths is empty"),
        ([4, 0], 8, {}, "document 1 has length 0"),
        ([4, -3], 8, {}, "document 1 has length -3"),
        ([4.0, 2.0], 8, {}, "lengths must be a row of integers.*float64"),
        (
            [[1, 2], [3]],
            8,
            {},
            r"lengths must be a row of integers, the tokens of each .* got \[\[1, 2\], \[3\]\]. Count .*len\(ids\)",
        ),
        ([4.0, float("nan")], 8, {}, r"a length is missing \(NaN\), measure it"),
        ([True, True], 8, {}, "lengths must be a row of integers.*bool"),
        ([[1, 2]], 8, {}, r"shape \(1, 2\)"),
        ([2**40], 8, {}, "longer than the capacity"),
        ([1], 0, {}, "capacity must be an integer from 1 to 2147483647; got 0"),
        ([1], 8.0, {}, "got 8.0"),
        ([1], True, {}, "got True"),
        ([1], 2**31, {}, "got 2147483648"),
        ([1], 8, {"max_items": 0}, "max_items must be an integer from 1 .*got 0"),
        ([1], 8, {"max_items": 1.5}, "max_items must be .*got 1.5"),
        ([1], 8, {"overlong": "cut"}, "overlong must be one of 'error', 'truncate', 'split', 'drop'; got 'cut'"),
        (
            [1],
            8,
            {"algorithm": "ffd"},
            "algorithm must be one of 'best_fit_decreasing', 'best_fit', 'next_fit', 'windowed'; got 'ffd'",
        ),
    ],
)
def test_refuses(lengths, capacity, options, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, capacity, **options)


@pytest.mark.slow
def test_first_call_imports_numba():
    script = (
        "import sys; from tritonpack import pack; assert not {'numba', 'transformers'} & set(sys.modules); "
        "pack([1], 1); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("capacity", [2048, 4096, 8192, 32768])
def test_number_of_bins_is_near_lower_bound(capacity):
    packing = pack(openchat(), capacity)
    assert packing.num_bins <= max(1.003 * packing.lower_bound, packing.lower_bound + 1)

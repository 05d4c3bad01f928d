import numpy as np
import pytest

from tests.packing import naive
from tritonpack.packing import pack
from tritonpack.packing.heuristics import MAX_CARRIES, WINDOW, WindowPacker, sort_by_bytes


def pack_windows(lengths, capacity, max_items, window, threshold):
    packer = WindowPacker(capacity, max_items, threshold)
    bins = []
    for start in range(0, len(lengths), window):
        documents, offsets = packer.add(lengths[start : start + window], last=start + window >= len(lengths))
        bins += [part.tolist() for part in np.split(documents, offsets[1:-1]) if len(part)]
    return bins


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("window", [1, 2, 7, 50])
def test_equals_naive_loop(window, threshold):
    rng = np.random.default_rng(window)
    for max_items in (200, 3):
        lengths = rng.integers(1, 64, 200).astype(np.int32)
        expected = naive.windowed(lengths.tolist(), 64, max_items, window, threshold)
        assert pack_windows(lengths, 64, max_items, window, threshold) == expected


def test_pack_equals_naive_loop_across_windows():
    lengths = np.random.default_rng(0).integers(1, 600, 2 * WINDOW + 100)
    packing = pack(lengths, 1000, algorithm="windowed")
    assert [items.tolist() for items in packing] == naive.windowed(lengths.tolist(), 1000, len(lengths))


def test_documents_wait_for_max_carries_windows():
    """With bins that are all 60% full, documents are carried, and the packer holds only a few windows."""
    packer = WindowPacker(100, 10, 0.95)
    for window in range(10):
        documents, offsets = packer.add(np.full(8, 60, dtype=np.int32))
        waiting = (window + 1) * 8 - MAX_CARRIES * 8
        assert documents.tolist() == (list(range(waiting - 8, waiting)) if waiting > 0 else [])
        assert len(offsets) - 1 == len(documents)


def test_overdue_documents_are_packed_first():
    """The shortest document is packed last, so it is left over repeatedly. Once overdue it is packed first."""
    packer = WindowPacker(100, 10, 0.95)
    window = np.array([99, 98], dtype=np.int32)
    assert packer.add(np.array([50], dtype=np.int32))[0].tolist() == []
    for added in range(1, 1 + 2 * (MAX_CARRIES - 1), 2):
        assert packer.add(window)[0].tolist() == [added, added + 1]
    documents, offsets = packer.add(np.array([50, 50], dtype=np.int32))
    assert documents.tolist()[: offsets[1]] == [0, 1 + 2 * (MAX_CARRIES - 1)]


def test_empty_window_makes_no_bin():
    packer = WindowPacker(100, 10, 0.95)
    none = np.zeros(0, dtype=np.int32)
    documents, offsets = packer.add(none, last=True)
    assert (documents.tolist(), offsets.tolist()) == ([], [0])
    documents, offsets = packer.add(np.array([10], dtype=np.int32))
    assert (documents.tolist(), offsets.tolist()) == ([], [0])
    documents, offsets = packer.add(none, last=True)
    assert (documents.tolist(), offsets.tolist()) == ([0], [0, 1])


def test_windowed_is_near_best_fit_and_input_order():
    lengths = np.random.default_rng(0).integers(1, 2049, 20 * WINDOW)
    packing = pack(lengths, 4096, algorithm="windowed")
    assert packing.num_bins <= 1.005 * pack(lengths, 4096).num_bins
    late = np.maximum.accumulate(packing.items) - packing.items
    assert late.max() < (MAX_CARRIES + 1) * WINDOW


@pytest.mark.parametrize("count", [0, 1, 2, 47, 48, 49, 300])
@pytest.mark.parametrize("most", [0, 1, 255, 256, 70_000])
def test_sorts_keys(count, most):
    keys = np.random.default_rng(count).integers(0, most + 1, count) << 16 | np.arange(count)
    expected, rest = sorted(keys.tolist()), [-1, -2]
    keys = np.append(keys, rest)
    sort_by_bytes(keys, np.empty(count, dtype=np.int64), np.empty(257, dtype=np.int64), count, 16, most)
    assert keys.tolist() == expected + rest

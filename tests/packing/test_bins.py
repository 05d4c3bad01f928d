import math
import subprocess
import sys

import numpy as np
import pytest

from tritonpack.packing import pack


def naive_best_fit_decreasing(lengths, capacity):
    """The textbook loop: longest first, into the fullest bin with room; among equals, the bin changed last."""
    bins, room, changed = [], [], []
    for step, item in enumerate(sorted(range(len(lengths)), key=lambda item: -lengths[item])):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[item]]
        if fitting:
            chosen = min(fitting, key=lambda b: (room[b], -changed[b]))
        else:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
            changed.append(step)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
        changed[chosen] = step
    return [sorted(items) for items in bins]


CAPACITIES = [1, 2, 7, 63, 64, 65, 100, 4095, 4096, 4097, 5000]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_equals_the_naive_loop(capacity):
    rng = np.random.default_rng(capacity)
    for _ in range(20):
        count = int(rng.integers(1, 120))
        longest = int(rng.integers(1, capacity + 1))
        lengths = rng.integers(1, longest + 1, count)
        if rng.random() < 0.5:  # few different lengths: long runs of equal ones
            lengths = rng.choice(rng.integers(1, longest + 1, 3), count)
        packing = pack(lengths, capacity)
        assert [items.tolist() for items in packing] == naive_best_fit_decreasing(lengths.tolist(), capacity)


@pytest.mark.parametrize("capacity", [64**2 - 1, 64**2, 64**3 - 1, 64**3, 64**3 + 1])
def test_every_document_once_and_no_bin_over_capacity(capacity):
    """At capacities where the bitmap gains a level."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, capacity + 1, 300), rng.integers(1, 9, 300), [capacity, 1]])
    packing = pack(lengths, capacity)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    loads = [int(lengths[items].sum()) for items in packing]
    assert max(loads) <= capacity
    assert packing.num_bins == len(loads) >= math.ceil(lengths.sum() / capacity)
    # Best fit never leaves two bins that one could hold.
    assert sum(sorted(loads)[:2]) > capacity


def test_efficiency_is_tokens_over_capacity():
    packing = pack([6, 4, 5], capacity=10)
    assert packing.num_bins == len(packing) == 2
    assert packing.num_tokens == 15
    assert packing.efficiency == 0.75
    assert repr(packing) == "Packing(3 documents in 2 bins of 10 tokens, efficiency 75.00%)"


def test_token_sums_do_not_wrap_at_32_bits():
    packing = pack(np.full(5_000, 1_000_000, dtype=np.int32), capacity=1_000_000)
    assert packing.num_tokens == 5_000_000_000
    assert packing.efficiency == 1.0


def test_bins_are_indexed_like_a_sequence():
    packing = pack([8, 3, 5], capacity=8)
    assert packing[0].tolist() == [0]
    assert packing[-1].tolist() == [1, 2]
    with pytest.raises(IndexError, match="bin 2 of a packing with 2 bins"):
        packing[2]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_any_integer_dtype(dtype):
    lengths = np.array([200, 100, 50], dtype=np.uint8).astype(dtype)
    assert [items.tolist() for items in pack(lengths, 250)] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        (
            [4, 9, 12],
            8,
            "2 of 3 documents are longer than .* 8 .*document 1, 9 tokens.*at least 12.*overlong=",
        ),
        ([], 8, "lengths is empty"),
        ([4, 0], 8, "document 1 has length 0"),
        ([4, -3], 8, "document 1 has length -3"),
        ([4.0, 2.0], 8, "lengths must be a row of integers.*float64"),
        ([True, True], 8, "lengths must be a row of integers.*bool"),
        ([[1, 2]], 8, r"shape \(1, 2\)"),
        ([2**40], 8, "longer than the capacity"),
        ([1], 0, "capacity must be an integer from 1 to 2147483647; got 0"),
        ([1], 8.0, "got 8.0"),
        ([1], True, "got True"),
        ([1], 2**31, "got 2147483648"),
    ],
)
def test_refuses(lengths, capacity, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, capacity)


def test_numba_is_imported_by_the_first_call_only():
    script = (
        "import sys; from tritonpack.packing import pack; assert not {'numba', 'transformers'} & set(sys.modules); "
        "pack([1], 1); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

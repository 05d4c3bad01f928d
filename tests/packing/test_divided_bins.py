import numpy as np
import pytest

from tritonpack.packing.bins import divide_bins
from tritonpack.packing.samplers.ranks import place_among_processes


@pytest.mark.parametrize(
    ("lengths", "offsets", "num_bins", "first", "expected"),
    [
        ([1, 2, 3, 4, 5], [0, 3, 5], 2, 0, [0, 3, 5]),
        ([1, 2, 3, 4, 5], [0, 3, 5], 3, 0, [0, 3, 4, 5]),  # 4 + 5 is the fullest
        ([1, 2, 3, 4, 5], [0, 3, 5], 4, 0, [0, 2, 3, 4, 5]),  # 1 + 2 and 3 are halves
        ([8, 1, 1, 1], [0, 4], 2, 0, [0, 1, 4]),
        ([1, 1, 1, 8], [0, 4], 2, 0, [0, 3, 4]),
        ([9, 2, 2], [0, 1, 3], 3, 0, [0, 1, 2, 3]),  # the fullest holds one entry
        ([5, 5, 1, 1], [0, 2, 4], 3, 1, [0, 2, 3, 4]),  # the first bin stays whole
        ([1, 1, 1], [0, 3], 3, 0, [0, 1, 2, 3]),
    ],
)
def test_fullest_bins_are_halved(lengths, offsets, num_bins, first, expected):
    assert divide_bins(np.array(lengths), np.array(offsets), num_bins, first).tolist() == expected


def test_place_is_from_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert place_among_processes() == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert place_among_processes() == (4, 3)

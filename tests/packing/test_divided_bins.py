import pytest

from tritonpack.packing.samplers.ranks import place_among_processes
from tritonpack.packing.stream import _whole_rounds


@pytest.mark.parametrize(
    ("bins", "ranks", "expected"),
    [
        ([[1, 2, 3], [4, 5]], 2, [[1, 2, 3], [4, 5]]),
        ([[1, 2, 3], [4, 5]], 3, [[1, 2, 3], [4], [5]]),  # 4 + 5 is the fullest
        ([[1, 2, 3], [4, 5]], 4, [[1, 2], [3], [4], [5]]),  # 1 + 2 and 3 are halves
        ([[8, 1, 1, 1]], 2, [[8], [1, 1, 1]]),
        ([[1, 1, 1, 8]], 2, [[1, 1, 1], [8]]),
        ([[9], [2, 2]], 3, [[9], [2], [2]]),  # the fullest holds one entry
        ([[1, 1, 1]], 3, [[1], [1], [1]]),
    ],
)
def test_fullest_bins_are_halved(bins, ranks, expected):
    held = {length: (None, length) for length in range(10)}
    assert _whole_rounds(bins, held, ranks) == (expected, 0)


def test_place_is_from_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert place_among_processes() == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert place_among_processes() == (4, 3)

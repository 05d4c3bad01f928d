"""Limits that spare the planner searches: they must hold for every packing, and leave out no exchange."""

import numpy as np
import pytest

pytest.importorskip("numba")

from tritonpack.packing.planning.filling import _can_exchange, _first_fit, _most_tokens


def drawn(seed):
    """Descending lengths, some of them equal, which of them are overdue, the number of rows, and what a row holds."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.choice([3, 5, 11, 20, 33, 49, 50, 51, 90], rng.integers(1, 40)))[::-1].astype(np.int64)
    return lengths, rng.random(len(lengths)) < 0.1, int(rng.integers(1, 9)), int(rng.choice([95, 100]))


def first_fit(lengths, overdue, rows, fill):
    room, row_of = [fill] * rows, [-1] * len(lengths)
    for turn in (True, False):
        for unit in np.flatnonzero(overdue == turn):
            fitting = [row for row in range(rows) if room[row] >= lengths[unit]]
            if fitting:
                row_of[unit] = fitting[0]
                room[fitting[0]] -= lengths[unit]
    return row_of


@pytest.mark.parametrize("seed", range(100))
def test_first_fit_equals_a_naive_loop(seed):
    lengths, overdue, rows, fill = drawn(seed)
    expected = first_fit(lengths, overdue, rows, fill)
    assert _first_fit(lengths, overdue, rows, fill).tolist() == expected
    held = lengths[np.array(expected) >= 0].sum()
    assert held <= _most_tokens(lengths, rows, fill) <= lengths.sum()


def test_first_fit_finds_room_in_rows_before_the_latest():
    lengths = np.array([90, 50, 50, 5], dtype=np.int64)
    assert _first_fit(lengths, np.zeros(4, dtype=bool), 3, 100).tolist() == [0, 1, 1, 0]


def test_most_tokens_knows_that_long_documents_share_no_row():
    lengths = np.array([90, 80, 70, 60], dtype=np.int64)
    assert _most_tokens(lengths, 3, 100) == 90 + 80 + 70
    assert _most_tokens(lengths, 2, 130) == 300


@pytest.mark.parametrize("seed", range(100))
def test_an_exchange_is_possible_if_any_pair_of_units_has_room(seed):
    lengths, overdue, rows, full = drawn(seed)
    row_of = _first_fit(lengths[::-1].copy(), overdue, rows, full)[::-1].copy()  # short ones first, so that some gain
    held = np.bincount(row_of[row_of >= 0], weights=lengths[row_of >= 0], minlength=rows).astype(np.int64)
    expected = any(
        0 < new - lengths[own] <= full - held[row_of[own]]
        for own in np.flatnonzero((row_of >= 0) & ~overdue)
        for new in lengths[row_of < 0]
    )
    assert _can_exchange(lengths, overdue, row_of, held, full) == expected

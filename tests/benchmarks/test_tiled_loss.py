"""The benchmark of the tiled loss compares ways that compute the same loss."""

import pytest

from benchmarks.tiled_loss import measure


@pytest.mark.slow
def test_losses_are_equal() -> None:
    every, tiled = (measure(rows, tokens=600, vocabulary=500, steps=2) for rows in (0, 64))
    assert tiled.loss == pytest.approx(every.loss, rel=1e-6)
    assert tiled.seconds > 0

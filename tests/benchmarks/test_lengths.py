"""The lengths that benchmarks and simulations share."""

import numpy as np
import pytest

from tests.lengths import distributions

TOKENS = 2**20


@pytest.mark.parametrize(
    ("name", "mean", "spread"), [("flan", 200, 0.95), ("orca", 320, 0.42), ("openchat", 1550, 0.41)]
)
def test_means_and_relative_spreads(name: str, mean: float, spread: float) -> None:
    lengths = np.array(distributions(TOKENS)[name])
    assert lengths.sum() == TOKENS
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert lengths.std() / lengths.mean() == pytest.approx(spread, rel=0.15)

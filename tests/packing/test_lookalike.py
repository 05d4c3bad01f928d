import numpy as np
import pytest

from tests.lengths import lookalike


def test_lookalike_has_statistics_of_openchat():
    lengths = lookalike()
    assert len(lengths) == 6144
    assert np.count_nonzero(lengths == 2048) == 3160
    assert 24 <= lengths.min() < 200
    assert lengths.max() == 2048
    assert lengths.mean() == pytest.approx(1550, rel=0.01)
    assert lengths[lengths < 2048].std() == pytest.approx(507, rel=0.03)
    assert abs(np.corrcoef(lengths[1:], lengths[:-1])[0, 1]) < 0.05


def test_lookalike_takes_size_and_seed():
    assert lookalike(100, seed=1).tolist() == lookalike(100, seed=1).tolist() != lookalike(100, seed=2).tolist()
    assert np.count_nonzero(lookalike(100_000) == 2048) == 51432

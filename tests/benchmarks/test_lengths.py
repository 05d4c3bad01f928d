"""Generated lengths have the means and spreads of their descriptions."""

import json
from pathlib import Path

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


def test_lengths_of_a_file_are_repeated_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([3, 5]))
    assert distributions(20, path)["file"] == [3, 5, 3, 5, 3, 1]


@pytest.mark.parametrize("content", [[], [3, 0], [[3]], {"lengths": []}])
def test_other_files_are_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="JSON list of positive token counts"):
        distributions(20, path)

"""The picture of a tree: its title counts the tokens, and its masks show the visible pairs."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks.draw_tree import draw, main

NODES = [(-1, 3), (0, 2), (0, 1)]  # 6 tokens, sequences of 5 and 4


def test_masks_show_the_visible_pairs() -> None:
    tree, whole, row, windowed = draw(NODES, window=2).axes
    assert tree.get_title() == "2 sequences, 9 tokens together, as a tree of 6 tokens"
    assert [text.get_text() for text in tree.texts] == ["A", "B", "sequence AB", "C", "sequence AC"]
    shown = [np.asarray(axes.images[0].get_array()) for axes in (whole, windowed)]
    assert shown[0][4:].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 0, 0, 3]]
    assert shown[1][4:].tolist() == [[0, 0, 0, 2, 2, 0], [0, 0, 1, 0, 0, 3]]
    numbers = [text.get_text() for text in row.texts if not text.get_text().isalpha()]
    assert numbers[6:12] == ["-1", "0", "1", "2", "3", "2"]  # parents
    assert numbers[12:18] == ["0", "1", "2", "3", "4", "3"]  # position ids


@pytest.mark.slow
def test_command_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tree.png"
    main(["--out", str(out)])
    assert capsys.readouterr().out.strip() == str(out)
    picture = out.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty figure has 5,000 or so

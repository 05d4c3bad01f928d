"""Pictures of the ledger, drawn from invented figures."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plot
from benchmarks.gpu.ledger import ABOUT, COLUMNS, OPS, Ledger
from benchmarks.harness.batch import Shape
from benchmarks.harness.peers import PEERS

MODEL = Shape("flan", 32768)
SHAPES = (MODEL, Shape("flan", 131072), Shape("tiny", 32768), Shape("one", 16384, 16, 16, 64, causal=False))


def invented(path: Path, shapes: tuple[Shape, ...] = SHAPES, device: str = "invented", commit: str = "abc") -> Path:
    about = dict.fromkeys(ABOUT, "") | {"device": device, "torch": "2.11.0", "triton": "3.6.0", "commit": commit}
    ledger = Ledger(path, about)
    for shape in shapes:
        for number, name in enumerate(("tritonpack", "FlashAttention-2 (torch)", "somebody else's")):
            for op in OPS:
                row = {**shape.columns(), "op": op, "implementation": name}
                if number == 2 and shape.distribution == "tiny":
                    ledger.write(row | {"status": "ValueError: too many documents"})
                    continue
                time = 1.0 + number
                figures = {"p20_ms": 0.9 * time, "p50_ms": time, "p80_ms": 1.2 * time, "tflops": 400 / time}
                ledger.write(row | {"status": "ok"} | figures)
    return path


def test_bars_ratios_and_titles(tmp_path: Path) -> None:
    kinds = plot.read(invented(tmp_path / "attention.csv"))
    figure = plot.bars(next(rows for kind, rows in kinds.items() if kind[-1] == "32768"))
    assert len(figure.axes) == len(OPS)
    for panel in figure.axes:
        heights = [patch.get_height() for patch in panel.patches]
        assert sorted(heights) == pytest.approx([400 / 3, 200, 200, 400, 400])
        assert [text.get_text() for text in panel.texts] == ["2.00\u00d7"] * 2
        assert [label.get_text() for label in panel.get_xticklabels()] == ["flan", "tiny"]
        assert sum(line.get_marker() == "x" for line in panel.lines) == 1  # somebody else's, tiny
    head = " ".join(text.get_text() for text in figure.texts) + str(figure.get_suptitle())
    assert "invented; torch 2.11.0, Triton 3.6.0; commit abc" in head
    assert "32 heads over 8 of 128, causal, bfloat16, 32,768 tokens" in head


def test_later_measurement_counts(tmp_path: Path) -> None:
    path = invented(tmp_path / "attention.csv", (MODEL,), commit="old")
    invented(path, (MODEL,), commit="new")
    (rows,) = plot.read(path).values()
    assert {row["commit"] for row in rows} == {"new"}
    assert len(rows) == 3 * len(OPS)
    about = dict.fromkeys(ABOUT, "") | {"device": "invented", "commit": "newer"}
    Ledger(path, about).write(
        {**MODEL.columns(), "op": "both", "implementation": "tritonpack", "status": "AssertionError: out"}
    )
    (rows,) = plot.read(path).values()
    assert len(rows) == 3 * len(OPS) - 1


def test_files_without_figures(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    with pytest.raises(SystemExit, match="doesn't exist"):
        plot.main([str(path)])
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
    with pytest.raises(SystemExit, match="no figure to draw"):
        plot.main([str(path)])
    Ledger(path, dict.fromkeys(ABOUT, "")).write(
        {**MODEL.columns(), "op": "forward", "implementation": "x", "status": "ValueError: no"}
    )
    with pytest.raises(SystemExit, match="no figure to draw"):
        plot.main([str(path)])
    path.write_text("what,tokens\nmask,5\n")
    with pytest.raises(SystemExit, match="isn't a ledger of attention: it lacks causal, "):
        plot.main([str(path)])


def test_each_peer_has_its_own_colour() -> None:
    assert set(plot.COLOURS) == {peer.name for peer in PEERS}
    assert len(set(plot.COLOURS.values())) == len(PEERS)
    assert set(COLUMNS) >= plot.NEEDED

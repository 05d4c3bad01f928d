"""Pictures of a ledger, drawn from invented figures."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import plot
from benchmarks.harness.batch import Shape
from benchmarks.harness.ledger import Ledger, joined, read
from benchmarks.harness.verify import OPS

SHAPES = (
    Shape("flan", 32768),
    Shape("flan", 131072),
    Shape("tiny", 32768),
    Shape("one", 16384, 16, 16, 64, causal=False),
)


def invented(path: Path) -> Path:
    ledger = Ledger(path, {"device": "invented", "versions": "torch=2.11.0", "commit": "abc"})
    for shape in SHAPES:
        for number, name in enumerate(("tritonpack", "FlashAttention-2 (torch)", "somebody else's")):
            for op in OPS:
                row = {"benchmark": f"attention, {op}", "case": joined(shape.parameters()), "implementation": name}
                if number == 2 and shape.distribution == "tiny":
                    ledger.write(row | {"status": "ValueError: too many documents"})
                    continue
                time = 1.0 + number
                times = {"p20_ms": 0.9 * time, "p50_ms": time, "p80_ms": 1.2 * time}
                ledger.write(row | times | {"status": "ok", "figures": f"tflops={400 / time}"})
    return path


def test_bars_ratios_and_titles(tmp_path: Path) -> None:
    found = plot.pictures(read(invented(tmp_path / "attention.csv")))
    assert len(found) == 3
    picture = next(one for one in found if "tokens=32768" in one[2])
    figure = plot.bars(picture, found[picture])
    assert len(figure.axes) == len(OPS)
    for panel in figure.axes:
        heights = [patch.get_height() for patch in panel.patches]
        assert sorted(heights) == pytest.approx([400 / 3, 200, 200, 400, 400])
        assert [text.get_text() for text in panel.texts] == ["2.00\u00d7"] * 2
        assert [label.get_text() for label in panel.get_xticklabels()] == ["flan", "tiny"]
        assert sum(line.get_marker() == "x" for line in panel.lines) == 1  # somebody else's, tiny
    head = " ".join(text.get_text() for text in figure.texts) + str(figure.get_suptitle())
    assert "invented; torch=2.11.0; commit abc" in head
    assert "attention: tokens=32768; heads=32; kv_heads=8; head_dim=128; causal=True; dtype=bfloat16" in head


def test_units() -> None:
    """TFLOP/s, tokens per second, or milliseconds; the ends of bars where the row has them."""
    row = {"p20_ms": "2", "p50_ms": "4", "p80_ms": "8", "figures": "tflops=10"}
    assert plot.heights(row, "tflops") == (10, 5, 20)
    assert plot.heights(row, "ms") == (4, 2, 8)
    without = {"p20_ms": "", "p50_ms": "", "p80_ms": "", "figures": "tokens_per_second=7"}
    assert plot.heights(without, "tokens_per_second") == (7, 7, 7)
    assert plot.heights(without | {"p50_ms": "4"}, "ms") == (4, 4, 4)


def test_committed_ledgers_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot.main(["benchmarks/results/training.csv", "--out", str(tmp_path)])
    assert len(capsys.readouterr().out.split()) == len([*tmp_path.glob("training-*.png")]) > 1


def test_file_without_figures(tmp_path: Path) -> None:
    Ledger(tmp_path / "a.csv", {}).write({"benchmark": "b", "status": "ValueError: no"})
    with pytest.raises(SystemExit, match="no figure to draw"):
        plot.main([str(tmp_path / "a.csv")])

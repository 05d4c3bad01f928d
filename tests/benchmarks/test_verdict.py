"""The verdict of the first day: steps, figures beside targets, and what belongs to which device."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.first_day.runner import ROOT, Platform
from benchmarks.first_day.verdict import FLASH_2, GLUON, TARGETS, Figures, Target, report, summary, targets
from benchmarks.gpu.ledger import ABOUT, OPS, Ledger
from benchmarks.harness.batch import Shape
from benchmarks.harness.peers import OURS
from tests.benchmarks.test_first_day import FAILS, day, python

pytestmark = pytest.mark.usefixtures("still_clock")

H200, H100 = Platform("NVIDIA H200", "3.9.0", "9.0"), Platform("NVIDIA H100 80GB HBM3", "3.9.0", "9.0")
A100 = Platform("NVIDIA A100-SXM4-80GB", "3.9.0", "8.0")
AT_128 = Shape("one", 16384, heads=16, kv_heads=16)


def ledger(folder: Path, platform: Platform = H200, commit: str = "abc1234") -> Ledger:
    about = dict.fromkeys(ABOUT, "x") | {"device": platform.device, "triton": platform.triton, "commit": commit}
    return Ledger(folder / "attention.csv", about)


def measured(to: Ledger, rates: Mapping[str, float], shape: Shape = AT_128) -> None:
    for name, tflops in rates.items():
        for op in OPS:
            about = {"documents": 1, "op": op, "implementation": name}
            to.write({**shape.columns(), **about, "status": "ok", "tflops": tflops})


class TestReport:
    def test_report(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a"), python("b", FAILS), python("c", after=("b",)), python("d"))
        done.run(60)
        text = report(done)
        assert summary(done) == "2 of 4 steps are ok, in 0.0 minutes. failed: b; skipped: c"
        assert "| a | what a shows | ok | 0 | fine |" in text
        assert "| c | what c shows | skipped | 0 | after b, which is failed |" in text
        assert text.endswith("## The end of b\n\n```text\nfirst\nbroken\n```\n")
        assert "TFLOP/s" not in text

    def test_figures_beside_targets(self, tmp_path: Path) -> None:
        to = ledger(tmp_path)
        rates = {OURS: 500, GLUON: 525, FLASH_2: 250}
        for shape in (Shape("one", 16384), Shape("stdlib", 32768), Shape("one", 16384, heads=16, kv_heads=16)):
            measured(to, rates, shape)
            missing = {"op": "forward", "implementation": "xformers", "status": "not installed: xformers"}
            to.write({**shape.columns(), "documents": 1, **missing})
        text = report(day(tmp_path, python("a"), platform=H200))
        assert text.startswith("# The first day on NVIDIA H200, Triton 3.9.0\n\nCommit abc1234. ")
        assert "\n\nCommits: abc1234.\n\n" in text
        assert "| stdlib, 32768 tokens, 32/8x128 | 500 | 500 | 0.95x | 2.00x | not installed: xformers |" in text
        at_128 = "one, 16384 tokens, 16/16x128"
        assert f"| {OURS}: {at_128}, forward | 480 TFLOP/s | 500 | met |" in text
        assert f"| {GLUON}: {at_128}, forward | 550 TFLOP/s | 525 | 0.95 of it |" in text
        assert f"| {GLUON}: {at_128}, backward | 420 TFLOP/s | 525 | met |" in text
        assert f"| {OURS}: stdlib, 32768 tokens, 32/8x128, both | 1.5 times {FLASH_2} | 2.00x | met |" in text
        assert f"| {OURS}: one, 16384 tokens, 32/32x64, forward | 400 TFLOP/s |  | not measured |" in text
        assert f"| {GLUON}: one, 16384 tokens, 32/32x64, backward | 340 TFLOP/s |  | not measured |" in text

    def test_why_a_target_has_no_figure(self, tmp_path: Path) -> None:
        wrong = {"documents": 1, "op": "forward", "implementation": GLUON, "status": "wrong results: dq"}
        ledger(tmp_path).write({**AT_128.columns(), **wrong})
        line = f"| {GLUON}: one, 16384 tokens, 16/16x128, forward | 550 TFLOP/s |  | wrong results: dq |"
        assert line in targets(Figures(tmp_path / "attention.csv", H200), judged=True)

    @pytest.mark.parametrize("target", TARGETS, ids=str)
    def test_targets_are_those_of_the_page(self, target: Target) -> None:
        """docs/figures.md has a row for each implementation."""
        kernels = {OURS: "Triton's kernels", GLUON: "kernels in Gluon"}[target.implementation]
        page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
        (row,) = re.findall(rf"^\| one causal document of 16k, {kernels}: (.*?) \|", page, re.M)
        (of_op,) = (part for part in row.split("; ") if part.startswith(target.op))
        assert re.search(rf"\b{target.tflops:.0f}( TFLOP/s)? at (head dimension )?{target.place.head_dim}\b", of_op)


class TestDevices:
    """The rows of two devices in one folder."""

    def text(self, folder: Path, platform: Platform) -> str:
        if not (folder / "attention.csv").exists():
            measured(ledger(folder, H200), {OURS: 600, GLUON: 600})
            measured(ledger(folder, H100), {OURS: 240, GLUON: 660})
            measured(ledger(folder, A100), {OURS: 150})
        return report(day(folder, python("a"), platform=platform))

    @pytest.mark.parametrize("platform", [H200, H100, A100], ids=lambda p: p.device)
    def test_each_has_its_own_rows(self, platform: Platform, tmp_path: Path) -> None:
        own = {H200: 600, H100: 240, A100: 150}[platform]
        text = self.text(tmp_path, platform)
        assert text.startswith(f"# The first day on {platform.device}, Triton 3.9.0\n")
        assert f"| one, 16384 tokens, 16/16x128 | {own} | {own} |" in text
        assert ("## Targets" in text) is (platform is not A100)  # they are for Hopper

    def test_only_an_h200_is_judged(self, tmp_path: Path) -> None:
        line = f"| {OURS}: one, 16384 tokens, 16/16x128, forward | 480 TFLOP/s |"
        assert f"{line} 600 | met |" in self.text(tmp_path, H200)
        text = self.text(tmp_path, H100)
        assert f"{line} 240 | 0.50 of it |" in text
        assert f"| {GLUON}: one, 16384 tokens, 16/16x128, forward | 550 TFLOP/s | 660 | 1.20 of it |" in text
        assert "| met |" not in text
        superchip = Platform("NVIDIA GH200 480GB", "3.9.0", "9.0")
        measured(ledger(tmp_path, superchip), {OURS: 600})
        assert "| met |" not in self.text(tmp_path, superchip)

    def test_rows_of_another_triton_do_not_count(self, tmp_path: Path) -> None:
        measured(ledger(tmp_path, H200._replace(triton="3.6.0")), {OURS: 600})
        assert "TFLOP/s" not in report(day(tmp_path, python("a"), platform=H200))

    def test_newest_row_counts_and_commits_are_named(self, tmp_path: Path) -> None:
        measured(ledger(tmp_path), {OURS: 600, FLASH_2: 300})
        measured(ledger(tmp_path, commit="def5678"), {OURS: 660})
        wrong = {"documents": 1, "op": "both", "implementation": FLASH_2, "status": "wrong results"}
        ledger(tmp_path, commit="def5678").write({**AT_128.columns(), **wrong})
        text = report(day(tmp_path, python("a"), platform=H200))
        assert "| one, 16384 tokens, 16/16x128 | 660 | 660 | wrong results |" in text
        assert "\n\nCommits: abc1234, def5678.\n\n" in text

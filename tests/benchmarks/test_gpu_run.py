"""The benchmark of attention on GPUs: its list of shapes, its time, failures; run on the CPU, with tiny shapes."""

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.gpu.__main__ as program
from benchmarks.gpu.__main__ import main, run
from benchmarks.gpu.ledger import ABOUT, CONTINUE, LOST, OPS, Budget, Ledger
from benchmarks.gpu.shapes import documents_of, quick_shapes, shapes, smoke_shapes
from benchmarks.gpu.table import table
from benchmarks.harness import measure as measuring
from benchmarks.harness.batch import Batch, Shape
from benchmarks.harness.measure import DeviceLostError, time_alternating
from benchmarks.harness.peers import OURS, PEERS, Peer, ours

CPU = torch.device("cpu")
HERE = dict.fromkeys(ABOUT, "") | {"commit": "abc1234"}


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time_alternating", lambda calls, device, _: time_alternating(calls, device, 2))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def missing(batch: Batch) -> Any:
    raise ModuleNotFoundError("No module named 'flash'")


class TestShapes:
    @pytest.mark.parametrize(
        "shape", {(s.distribution, s.tokens): s for s in (*shapes(), *quick_shapes())}.values(), ids=str
    )
    def test_lengths_fill_the_batch(self, shape: Shape) -> None:
        lengths, parents = documents_of(shape)
        assert sum(lengths) == shape.tokens
        assert min(lengths) > 0
        assert (parents is not None) == shape.trees
        assert parents is None or len(parents) == shape.tokens


class TestRun:
    peers = (Peer(OURS, ours),)

    def test_second_run_continues_the_first(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        todo, path = smoke_shapes()[:2], tmp_path / "attention.csv"
        assert run(todo[:1], Ledger(path, HERE), Budget(5), CPU, peers=self.peers) == []
        before = path.read_text()
        assert run(todo, Ledger(path, HERE), Budget(5), CPU, peers=self.peers) == []
        after = path.read_text()
        assert after.startswith(before)
        assert len(after.splitlines()) == 1 + 2 * len(OPS)
        run(todo, Ledger(path, HERE), Budget(5), CPU, peers=self.peers)
        assert path.read_text() == after

    def test_peer_that_broke_the_device_is_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = []

        def breaks(batch: Batch) -> Any:
            tried.append(1)
            raise RuntimeError("an illegal memory access was encountered")

        path, peers = tmp_path / "attention.csv", (Peer("breaks", breaks), *self.peers)
        monkeypatch.setattr(measuring, "_broken", lambda device: True)
        with pytest.raises(DeviceLostError, match="breaks: RuntimeError"):
            run(smoke_shapes()[:1], Ledger(path, HERE), Budget(5), CPU, peers=peers)
        monkeypatch.undo()
        assert run(smoke_shapes()[:1], Ledger(path, HERE), Budget(5), CPU, peers=peers) == []
        assert tried == [1]
        rows = read(path)
        assert [row["status"].startswith(LOST) for row in rows] == [True] * 3 + [False] * 3

    @pytest.mark.slow
    def test_peer_that_hangs_is_left_out_by_the_next_run(self, tmp_path: Path) -> None:
        program = "\n".join([
            "import time, torch",
            "import benchmarks.gpu.__main__ as program",
            "from benchmarks.gpu.shapes import smoke_shapes",
            "from tests.benchmarks.test_gpu_run import CPU, HERE, Budget, Ledger, Path, Peer",
            "measure = program.measure",
            "def begin(*given): program.HUNG = 0.5; measure(*given)  # from the first peer on",
            "program.HUNG, program.measure = 3600.0, begin",
            "hangs = Peer('hangs', lambda batch: time.sleep(600))",
            f"ledger = Ledger(Path({str(tmp_path / 'attention.csv')!r}), HERE)",
            "program.run(smoke_shapes()[:1], ledger, Budget(5), CPU, peers=(hangs,))",
        ])  # fmt: skip
        assert subprocess.run([sys.executable, "-c", program]).returncode == CONTINUE
        ledger = Ledger(tmp_path / "attention.csv", HERE)
        assert ledger.lost(smoke_shapes()[0].columns(), "hangs")
        assert run(smoke_shapes()[:1], ledger, Budget(5), CPU, peers=(Peer("hangs", missing), *self.peers)) == []


class TestMain:
    def test_smoke_run_on_a_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(program, "PEERS", (Peer(OURS, ours, trees=True), Peer("flash", missing)))
        main(["--device", "cpu", "--out", str(tmp_path), "--commit", "abc1234"])
        assert "4 of 4 shapes" in capsys.readouterr().out
        rows = read(tmp_path / "attention.csv")
        assert {row["causal"] for row in rows} == {"True", "False"}
        assert {(row["implementation"], row["status"] == "ok") for row in rows} == {(OURS, True), ("flash", False)}
        assert all("CPU" in row["device"] and row["commit"] == "abc1234" for row in rows)

    def test_quick_run_prints_a_table_and_draws(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        others = [peer.name for peer in PEERS if not peer.on_cpu]
        quick = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc1234", "--first", "1"]
        main([*quick, "--without", *others])
        printed, written = capsys.readouterr().out, (tmp_path / "table.md").read_text("utf-8")
        assert written in printed
        assert "| documents, tokens, heads | direction | tritonpack | sdpa, padded | sdpa, dense mask |" in written
        assert len(re.findall(r"^\| flan, 320 tokens.* \|( [\d.]+ \|){3}$", written, re.MULTILINE)) == 3
        assert list(tmp_path.glob("*.png"))

    def test_table_says_the_share_of_a_matrix_product_and_why_a_figure_is_missing(self, tmp_path: Path) -> None:
        shape = Shape("one", 320)
        ledger = Ledger(tmp_path / "attention.csv", HERE)
        for name, row in (
            ("tritonpack", {"status": "ok", "tflops": "300"}),
            ("xformers", {"status": "not installed: ModuleNotFoundError"}),
            ("FlexAttention", {"status": "OutOfMemoryError: of 80 GiB"}),
        ):
            ledger.write({**shape.columns(), "op": "forward", "implementation": name, **row})
        text = table(ledger.path, HERE, [shape], 600.0)
        assert text.endswith("| direction | tritonpack | FlexAttention |\n|---|---|---|---|\n"
                             f"| {shape} | forward | 300 (50%) | OutOfMemoryError: of 80 GiB |")  # fmt: skip

    def test_prints_the_shapes_that_are_left(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"])
        assert exit.value.code == CONTINUE
        assert f"continues with:\n  {smoke_shapes()[0]}\n" in capsys.readouterr().out

    def test_own_sizes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(program, "PEERS", (Peer(OURS, ours, on_cpu=True),))
        sizes = ["--tokens", "96", "--heads", "4", "--head-dim", "16", "--dtype", "float32", "--repeats", "1"]
        main(["--device", "cpu", "--out", str(tmp_path), *sizes])
        rows = read(tmp_path / "attention.csv")
        assert len(rows) == 4 * 3
        assert {row["status"] for row in rows} == {"ok"}
        names = ("tokens", "heads", "kv_heads", "head_dim", "dtype")
        assert {tuple(row[name] for name in names) for row in rows} == {("96", "4", "1", "16", "float32")}
        assert len({row["distribution"] for row in rows}) == 4

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--tokens", "0"], "--tokens must be from 1 to "),
            (["--tokens", "96", "--head-dim", "1000"], "--head-dim must be from 1 to "),
            (["--heads", "4"], "the list has its own shapes without --tokens; leave out --heads"),
            (["--device", "cpu"], "--device cpu needs --out"),
            (["--without", "flash"], "--without knows 'tritonpack', "),
        ],
    )
    def test_wrong_options_are_refused(self, arguments: list[str], message: str, capsys: Any) -> None:
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err

    def test_list_prints_every_shape(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(["--list"])
        assert capsys.readouterr().out.splitlines() == list(map(str, shapes()))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_missing_gpu_is_refused(self) -> None:
        with pytest.raises(SystemExit, match="torch sees none here"):
            main([])

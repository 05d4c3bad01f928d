"""The programs `benchmarks.gpu` and `benchmarks.cpu`, and what they share: rows whatever fails, the clock."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.gpu.__main__ as gpu
from benchmarks.cpu import __main__ as cpu
from benchmarks.gpu import masks
from benchmarks.gpu.shapes import case_of, documents_of, quick_shapes, shapes, smoke_shapes
from benchmarks.harness import measure as measuring
from benchmarks.harness import registry
from benchmarks.harness.batch import Batch, Shape
from benchmarks.harness.ledger import ABOUT, Ledger, Row, parted, read
from benchmarks.harness.measure import LOST, DeviceLostError, Times, measure, quantiles, time_alternating, time_limit
from benchmarks.harness.peers import PEERS, Peer, ours
from benchmarks.harness.registry import OURS, Call, Case, register, selected
from benchmarks.harness.run import Budget, run, table
from benchmarks.harness.verify import OPS, WORK, checked
from tests.benchmarks.harness.batches import batch_of

CPU = torch.device("cpu")
HERE = dict.fromkeys(ABOUT, "") | {"commit": "abc1234"}
BENCHMARKS = [f"attention, {op}" for op in OPS]


def missing(batch: Batch) -> Any:
    raise ModuleNotFoundError("No module named 'flash'")


def slow(batch: Batch) -> Any:
    time.sleep(600)


def wrong(batch: Batch) -> Any:
    right = ours(batch)
    return lambda q, k, v: right(q, k, 1.01 * v)


def forward_only(batch: Batch) -> Any:
    right = ours(batch)
    return lambda q, k, v: right(q, k, v).detach()


def tires(batch: Batch) -> Any:
    """Fails after the check, while it is timed."""
    right, calls = ours(batch), [0]

    def attention(q: Any, k: Any, v: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("out of memory")
        return right(q, k, v)

    return attention


# A peer, and how the status of forward, backward and both begins
STATUS: list[tuple[Any, tuple[str, str, str]]] = [
    (missing, ("not installed: No module named 'flash'",) * 3),
    (slow, ("TimeoutError: not ready after 0.2 seconds",) * 3),
    (wrong, ("AssertionError: out beyond",) * 3),
    (forward_only, ("ok", *["NotImplementedError: no backward here"] * 2)),
    (tires, ("RuntimeError: out of memory", "ok", "RuntimeError: out of memory")),
]


def measured(*peers: Peer) -> dict[tuple[str, str], Any]:
    rows: list[Any] = []
    case = Case("", OPS, {"tokens": 138}, lambda: {**checked(batch_of("causal"), peers)})
    measure(case, rows.append, CPU, repeats=2)
    assert len({(row["implementation"], row["benchmark"]) for row in rows}) == len(rows) == 3 * len(peers)
    assert {row["case"] for row in rows} == {"tokens=138"}
    return {(row["implementation"], row["benchmark"]): row for row in rows}


def test_flops_and_percentiles() -> None:
    """4 operations per visible pair, head and dimension."""
    lengths = (37, 1, 80, 20)
    flops = batch_of("causal").flops()
    assert flops == 4 * 4 * 16 * sum(n * (n + 1) // 2 for n in lengths)
    assert batch_of("bidirectional").flops() == 4 * 4 * 16 * sum(n * n for n in lengths)
    rows = measured(Peer(OURS, ours))
    for op in OPS:
        row = rows[OURS, op]
        p20, p50, p80 = (float(row[f"p{n}_ms"]) for n in (20, 50, 80))
        assert (row["status"], 0 < p20 <= p50 <= p80) == ("ok", True)
        assert float(parted(row["figures"])["tflops"]) == pytest.approx(WORK[op] * flops / p50 / 1e9, rel=1e-2)


@pytest.mark.parametrize(("prepare", "expected"), STATUS)
def test_rows_without_a_figure_say_why(prepare: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are measured."""
    monkeypatch.setattr(measuring, "PATIENCE", 0.2 if prepare is slow else 60.0)
    rows = measured(Peer("peer", prepare), Peer(OURS, ours))
    for op, status in zip(OPS, expected, strict=True):
        assert rows["peer", op]["status"].startswith(status)
        assert ("p50_ms" in rows["peer", op]) == (status == "ok")
        assert prepare is slow or rows[OURS, op]["status"] == "ok"


def test_calls_take_turns_in_their_contexts() -> None:
    order: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        order.append("(")
        yield
        order.append(")")

    def fails() -> None:
        order.append("x")
        raise RuntimeError("no memory")

    calls = {"a": Call(lambda: order.append("a"), around), "b": Call(lambda: order.append("b")), "x": Call(fails)}
    times = time_alternating(calls, CPU, 3)
    assert "".join(order) == "(a)bx" + "(a)b" * (measuring.WARM_UP + 2)
    assert [len(t.device) for t in times.values()] == [3, 3, 0]
    assert str(times["x"].error) == "no memory"
    assert [Times([n] * many).enough for n, many in ((200.0, 4), (200.0, 5), (1.0, 20))] == [False, True, False]
    assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == (1.0, 2.5, 4.0)
    with time_limit(3600):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(
    "shape", {(s.distribution, s.tokens): s for s in (*shapes(), *quick_shapes())}.values(), ids=str
)
def test_lengths_fill_the_batch(shape: Shape) -> None:
    lengths, parents = documents_of(shape)
    assert sum(lengths) == shape.tokens
    assert min(lengths) > 0
    assert len(parents or ()) == shape.tokens * shape.trees


class TestRun:
    def run(self, path: Path, *peers: Peer, cases: int = 1, minutes: float = 5) -> int:
        """How many cases are left."""
        todo = [case_of(shape, (*peers, Peer(OURS, ours)), CPU) for shape in smoke_shapes()[:cases]]
        return len(run(todo, Ledger(path, HERE), Budget(minutes), CPU, repeats=2))

    def test_second_run_continues_the_first(self, tmp_path: Path) -> None:
        path = tmp_path / "attention.csv"
        assert self.run(path) == 0
        before = path.read_text()
        assert self.run(path, cases=2, minutes=0) == 1
        assert path.read_text() == before
        assert self.run(path, cases=2) == 0
        after = path.read_text()
        assert after.startswith(before)
        assert len(after.splitlines()) == 1 + 2 * len(OPS)
        assert self.run(path, cases=2) == 0
        assert path.read_text() == after

    def test_peer_that_broke_the_device_is_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = []

        def breaks(batch: Batch) -> Any:
            tried.append(1)
            raise RuntimeError("an illegal memory access was encountered")

        path = tmp_path / "attention.csv"
        monkeypatch.setattr(measuring, "_broken", lambda device: True)
        with pytest.raises(DeviceLostError, match="breaks: RuntimeError"):
            self.run(path, Peer("breaks", breaks))
        monkeypatch.undo()
        assert self.run(path, Peer("breaks", breaks)) == 0
        assert tried == [1]
        assert [row["status"].startswith(LOST) for row in read(path)] == [True] * 3 + [False] * 3


class TestGpu:
    @pytest.fixture(autouse=True)
    def _few_repeats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "time_alternating", lambda calls, device, _: time_alternating(calls, device, 2))

    def test_quick_run_prints_a_table_and_draws(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        others = [peer.name for peer in PEERS if not peer.on_cpu]
        quick = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc1234", "--first", "1"]
        gpu.main([*quick, "--without", *others])
        printed, written = capsys.readouterr().out, (tmp_path / "table.md").read_text("utf-8")
        assert written in printed
        peers = r"sdpa, padded \S+ TFLOP/s \(\S+\); sdpa, dense mask \S+ TFLOP/s \(\S+\)"
        row = rf"^\| attention, \w+ \| distribution=flan; .* \| [\d.e-]+ TFLOP/s \| {peers} \|$"
        assert len(re.findall(row, written, re.M)) == 3
        assert list(tmp_path.glob("*.png"))

    def test_own_sizes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "PEERS", (Peer(OURS, ours, on_cpu=True), Peer("flash", missing)))
        sizes = ["--tokens", "96", "--heads", "4", "--head-dim", "16", "--dtype", "float32", "--repeats", "1"]
        gpu.main(["--device", "cpu", "--out", str(tmp_path), *sizes])
        rows = read(tmp_path / "attention.csv")
        assert [(row["implementation"], row["status"]) for row in rows] == [(OURS, "ok")] * 4 * 3
        cases = {row["case"].partition("; ")[::2] for row in rows}
        assert {x for _, x in cases} == {"tokens=96; heads=4; kv_heads=1; head_dim=16; causal=True; dtype=float32"}
        assert len(cases) == 4

    def test_wrong_options_are_refused(self, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        for arguments, message in (
            ("--tokens 0", "--tokens must be from 1 to "),
            ("--tokens 96 --head-dim 1000", "--head-dim must be from 1 to "),
            ("--heads 4", "the list has its own shapes without --tokens; leave out --heads"),
            ("--device cpu", "--device cpu needs --out"),
            ("--without flash", "--without knows 'tritonpack', "),
            ("", "torch sees none here"),
        ):
            with pytest.raises(SystemExit) as exit:
                gpu.main(arguments.split())
            assert message in f"{exit.value}{capsys.readouterr().err}"

    def test_masks_on_a_cpu(self, tmp_path: Path) -> None:
        masks.main(["--device", "cpu", "--out", str(tmp_path), "--tokens", "2000", "--dense-tokens", "128"])
        rows = read(tmp_path / "masks.csv")
        assert {row["status"] for row in rows} == {"ok"}
        assert [parted(row["case"])["mask"] for row in rows if row["implementation"] == OURS] == [
            *masks.BUILT, *masks.WRITTEN
        ]  # fmt: skip
        assert ["gb_per_s" in row["figures"] for row in rows].count(True) == 3


class TestCpu:
    def test_cases_of_the_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "CASES", [])

        @register("squares", numbers=(2, 3), kind=("a",))
        def squares(numbers: int, kind: str) -> dict[str, Any]:
            return {kind: partial(pow, numbers, 2)}

        @register("forward", "backward")
        def both() -> dict[str, Any]:
            return {OURS: lambda: iter([Call(lambda: 1), lambda: 2])}

        assert [case.text for case in selected("test_squares")] == ["numbers=2; kind=a", "numbers=3; kind=a"]
        assert [case.text for case in selected("test_run numbers=3")] == ["numbers=3; kind=a"]
        (case,) = selected("backward")
        assert selected("backward squares") == []
        assert [call.function() for call in case.calls(case.prepare()[OURS])] == [1, 2]
        (call,) = selected("numbers=3")[0].calls(selected("numbers=3")[0].prepare()["a"])
        assert call.function() == 9

    def test_measures_and_writes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The whole command, on the quickest benchmark; a second run measures again."""
        for _ in range(2):
            cpu.main(["--out", str(tmp_path), "-k", "masks mask=transpose"])
        path = tmp_path / "cpu.csv"
        assert len(path.read_text().splitlines()) == 3
        (row,) = read(path)
        assert (row["benchmark"], row["case"]) == ("masks, 131072 tokens", "mask=transpose")
        assert float(row["p50_ms"]) > 0
        capsys.readouterr()
        cpu.main(["--out", str(tmp_path), "--table"])
        assert capsys.readouterr().out.splitlines()[-1].startswith("| masks, 131072 tokens | mask=transpose | ")
        with pytest.raises(SystemExit, match=r"no/cpu\.csv does"):
            cpu.main(["--table", "--out", "no"])

    def test_table(self) -> None:
        def row(implementation: str, status: str = "ok", **columns: str) -> Row:
            given = {"device": "", "benchmark": "b", "case": "c", "p50_ms": "", "figures": "", **columns}
            return {"implementation": implementation, "status": status, **given}

        rows = [
            row(OURS, p50_ms="2", figures="tflops=300; launches=1"),
            row("x", p50_ms="5.0"),
            row("y", "Error: no | here"),
            row("z", "not installed: z"),
            row("w", figures="speed=2"),
            row("v", case="d", p50_ms="3"),
        ]
        *_, one, two = table(rows, 600.0)
        assert one == "| b | c | 300 TFLOP/s (50%) | x 5 ms (2.50); y (Error: no / here); w speed=2 |"
        assert two == "| b | d |  | v 3 ms |"

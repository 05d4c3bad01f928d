"""The benchmark of attention as it runs: the list, the time, what fails; on the CPU, with tiny shapes."""

import csv
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks.gpu.__main__ as program
from benchmarks.gpu import measure as measuring
from benchmarks.gpu.__main__ import Budget, main, run
from benchmarks.gpu.ledger import ABOUT, LOST, OPS, Ledger
from benchmarks.gpu.measure import DeviceLostError, measure, time_limit
from benchmarks.gpu.peers import OURS, Peer, ours
from benchmarks.gpu.shapes import Shape, make_batch, shapes, smoke_shapes
from tests.benchmarks.batches import batch_of
from tests.lengths import distributions
from tritonpack.cli.bench import timing
from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.timing import Times, quantiles, time_alternating

CPU = torch.device("cpu")
HERE = dict.fromkeys(ABOUT, "") | {"commit": "abc1234"}


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time_alternating", lambda calls, device: time_alternating(calls, device, 2))


def missing(batch: Batch) -> Any:
    raise ModuleNotFoundError("No module named 'flash'")


def wrong(batch: Batch) -> Any:
    right = ours(batch)
    return lambda q, k, v: right(q, k, 1.01 * v)


def forward_only(batch: Batch) -> Any:
    right = ours(batch)
    return lambda q, k, v: right(q, k, v).detach()


def measured(*peers: Peer) -> dict[tuple[str, str], Mapping[str, object]]:
    rows: list[Mapping[str, object]] = []
    measure(batch_of("causal"), peers, rows.append)
    assert len({(row["implementation"], row["op"]) for row in rows}) == len(rows) == 3 * len(peers)
    return {(str(row["implementation"]), str(row["op"])): row for row in rows}


class TestShapes:
    def test_the_first_minute_is_worth_it(self) -> None:
        """The targets: real lengths and one long document, grouped heads of 128, causal."""
        first = shapes()[:7]
        assert {s.distribution for s in first} == {"stdlib", "one", "flan", "openchat", "skewed", "orca", "tiny"}
        assert all((s.heads, s.kv_heads, s.head_dim, s.causal) == (32, 8, 128, True) for s in first)

    def test_all_that_was_asked_for(self) -> None:
        listed = shapes()
        assert len(set(listed)) == len(listed)
        assert {s.head_dim for s in listed} == {64, 128, 256}
        assert {s.tokens for s in listed} == {16384, 32768, 65536, 131072}
        assert {s.causal for s in listed} == {True, False}
        assert {s.window for s in listed} == {(-1, -1), (4096, 0)}
        assert {s.heads == s.kv_heads for s in listed} == {True, False}

    def test_a_file_of_lengths_comes_early(self) -> None:
        assert "file" not in {s.distribution for s in shapes()}
        listed = shapes(from_file=True)
        assert listed[2].distribution == "file"
        assert {s.tokens for s in listed if s.distribution == "file"} >= {32768, 131072}

    @pytest.mark.parametrize("shape", {(s.distribution, s.tokens): s for s in shapes()}.values(), ids=str)
    def test_lengths_fill_the_batch(self, shape: Shape) -> None:
        lengths = distributions(shape.tokens)[shape.distribution]
        assert sum(lengths) == shape.tokens
        assert min(lengths) > 0

    def test_the_skewed_batch(self) -> None:
        assert distributions(32768)["skewed"] == [16384] + [256] * 64

    def test_useful_work(self) -> None:
        """4 operations per visible pair, head and dimension."""
        batch = batch_of("causal")
        pairs = sum(n * (n + 1) // 2 for n in (37, 1, 80, 20))
        assert batch.visible_pairs() == pairs
        assert batch.flops() == 4 * 4 * 16 * pairs
        assert batch_of("bidirectional").visible_pairs() == sum(n * n for n in (37, 1, 80, 20))

    @pytest.mark.parametrize("shape", smoke_shapes(), ids=str)
    def test_tensors(self, shape: Shape) -> None:
        batch = make_batch(shape, distributions(shape.tokens)[shape.distribution], CPU)
        assert batch.q.shape == batch.dout.shape == (shape.tokens, shape.heads, shape.head_dim)
        assert batch.k.shape == batch.v.shape == (shape.tokens, shape.kv_heads, shape.head_dim)
        assert batch.cu_seqlens.tolist()[-1] == sum(batch.lengths) == shape.tokens
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.q.any()
        assert batch.grouped


class TestMeasure:
    def test_rows_of_what_runs(self) -> None:
        rows = measured(Peer(OURS, ours))
        for op in OPS:
            row = rows[OURS, op]
            assert row["status"] == "ok"
            assert 0 < float(str(row["p20_ms"])) <= float(str(row["p50_ms"])) <= float(str(row["p80_ms"]))
            work = {"forward": 1.0, "backward": 2.5, "both": 3.5}[op] * batch_of("causal").flops()
            assert float(str(row["tflops"])) == pytest.approx(work / float(str(row["p50_ms"])) / 1e9, rel=1e-2)

    def test_no_figure_for_a_wrong_result(self) -> None:
        rows = measured(Peer("wrong", wrong), Peer(OURS, ours))
        assert all(str(rows["wrong", op]["status"]).startswith("AssertionError: out beyond") for op in OPS)
        assert all("p50_ms" not in rows["wrong", op] for op in OPS)
        assert all(rows[OURS, op]["status"] == "ok" for op in OPS)

    def test_what_has_no_backward_is_measured_forward(self) -> None:
        rows = measured(Peer("forward only", forward_only))
        assert rows["forward only", "forward"]["status"] == "ok"
        assert rows["forward only", "backward"]["status"] == "NotImplementedError: no backward here"

    def test_what_is_not_installed(self) -> None:
        assert measured(Peer("flash", missing))["flash", "forward"]["status"] == (
            "not installed: No module named 'flash'"
        )

    def test_what_is_never_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "PATIENCE", 0.05)

        def slow(batch: Batch) -> Any:
            time.sleep(30)

        rows = measured(Peer("slow", slow))
        assert rows["slow", "both"]["status"] == "TimeoutError: not ready after 0.05 seconds"

    def test_what_fails_while_it_is_timed(self) -> None:
        calls = [0]

        def tires(batch: Batch) -> Any:
            right = ours(batch)

            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                calls[0] += 1
                if calls[0] > 1:
                    raise RuntimeError("out of memory")
                return right(q, k, v)

            return attention

        rows = measured(Peer("tires", tires), Peer(OURS, ours))
        assert rows["tires", "forward"]["status"] == rows["tires", "both"]["status"] == "RuntimeError: out of memory"
        assert rows["tires", "backward"]["status"] == rows[OURS, "both"]["status"] == "ok"

    def test_time_limit_leaves_nothing_behind(self) -> None:
        with time_limit(0.05):
            pass
        time.sleep(0.1)


class TestTiming:
    def test_in_turn(self) -> None:
        order: list[str] = []
        times = time_alternating({name: lambda name=name: order.append(name) for name in "ab"}, CPU, 3)
        assert order == list("ab") * (timing.WARM_UP + 3)
        assert all(len(t.device) == len(t.host) == 3 and t.error is None for t in times.values())

    def test_a_slow_call_leaves_the_round(self) -> None:
        assert not Times([200.0] * 4).enough
        assert Times([200.0] * 5).enough
        assert not Times([1.0] * 20).enough

    def test_what_raises_is_not_tried_again(self) -> None:
        calls = [0]

        def fails() -> None:
            calls[0] += 1
            raise RuntimeError("no memory")

        times = time_alternating({"fails": fails, "runs": lambda: None}, CPU, 3)
        assert calls == [1]
        assert str(times["fails"].error) == "no memory"
        assert len(times["runs"].device) == 3

    def test_the_order_of_things_on_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cache is cold and the host ahead before the first event; the last one is waited for."""
        done: list[str] = []

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                done.append("event")

            def elapsed_time(self, end: Any) -> float:
                return 1.5

        class Cache:
            def zero_(self) -> None:
                done.append("cold")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("head start"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
        cache: Any = Cache()
        on_device, on_host = timing._time_on_device(lambda: done.append("call"), cache)
        assert done == ["cold", "head start", "event", "call", "event", "wait"]
        assert on_device == 1.5
        assert on_host < 1000

    def test_quantiles(self) -> None:
        assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == (1.0, 2.5, 4.0)


class TestRun:
    peers = (Peer(OURS, ours),)

    def test_goes_on_where_it_ended(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        todo, path = smoke_shapes()[:2], tmp_path / "attention.csv"
        assert run(todo[:1], Ledger(path, HERE), Budget(5), CPU, peers=self.peers) == []
        before = path.read_text()
        assert run(todo, Ledger(path, HERE), Budget(5), CPU, peers=self.peers) == []
        after = path.read_text()
        assert after.startswith(before)
        assert len(after.splitlines()) == 1 + 2 * len(OPS)
        run(todo, Ledger(path, HERE), Budget(5), CPU, peers=self.peers)
        assert path.read_text() == after

    def test_begins_nothing_when_time_is_up(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "attention.csv", HERE)
        assert run(smoke_shapes(), ledger, Budget(0), CPU, peers=self.peers) == smoke_shapes()
        assert not ledger.known

    def test_time_for_one_more(self) -> None:
        budget = Budget(1)
        assert budget.allows()
        budget.spend(70)
        assert not budget.allows()
        for seconds in (10, 20, 10):  # the first compiles; only the last three count
            budget.spend(seconds)
        assert budget.allows()

    def test_after_a_lost_device_the_culprit_is_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["status"].startswith(LOST) for row in rows] == [True] * 3 + [False] * 3

    def test_lengths_of_a_file(self, tmp_path: Path) -> None:
        lengths = tmp_path / "lengths.json"
        lengths.write_text(json.dumps([30, 50]))
        shape = Shape("file", 200, 4, 2, 16, dtype="float32")
        ledger = Ledger(tmp_path / "attention.csv", HERE)
        run([shape], ledger, Budget(5), CPU, peers=self.peers, lengths_file=lengths)
        with ledger.path.open(newline="") as file:
            assert next(csv.DictReader(file))["documents"] == "6"  # 30, 50, 30, 50, 30 and 10 that fit in


class TestMain:
    def test_smoke_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(program, "PEERS", (Peer(OURS, ours), Peer("flash", missing)))
        main(["--device", "cpu", "--out", str(tmp_path), "--parts", "2", "--part", "1", "--commit", "abc1234"])
        assert "1 of 1 shapes" in capsys.readouterr().out
        with (tmp_path / "attention.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["causal"] for row in rows} == {"False"}
        assert {(row["implementation"], row["status"] == "ok") for row in rows} == {(OURS, True), ("flash", False)}
        assert all("CPU" in row["device"] and row["commit"] == "abc1234" for row in rows)

    def test_says_what_is_left(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"])
        assert f"goes on with:\n  {smoke_shapes()[0]}\n" in capsys.readouterr().out

    def test_smoke_rows_stay_apart_from_measured_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--device", "cpu"])
        assert "--device cpu needs --out" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--part", "2", "--parts", "2"], "--part counts from 0"),
            (["--without", "flash"], "--without knows 'tritonpack', "),
        ],
    )
    def test_refuses(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err

    def test_parts_make_up_the_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        listed = []
        for part in range(3):
            main(["--list", "--part", str(part), "--parts", "3"])
            listed.append(capsys.readouterr().out.splitlines())
        assert sorted(line for part in listed for line in part) == sorted(map(str, shapes()))
        assert [part[0] for part in listed] == [str(shape) for shape in shapes()[:3]]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self) -> None:
        with pytest.raises(SystemExit, match="torch sees none here"):
            main([])

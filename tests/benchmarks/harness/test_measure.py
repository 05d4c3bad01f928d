"""Measuring a batch: rows for all peers whatever fails, and the clock; on the CPU."""

import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import measure as measuring
from benchmarks.harness.batch import Batch
from benchmarks.harness.measure import OPS, Times, measure, quantiles, time_alternating, time_limit
from benchmarks.harness.peers import OURS, Peer, ours
from tests.benchmarks.harness.batches import batch_of

CPU = torch.device("cpu")


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

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


def measured(*peers: Peer) -> dict[tuple[str, str], Mapping[str, object]]:
    rows: list[Mapping[str, object]] = []
    measure(batch_of("causal"), peers, rows.append, repeats=2)
    assert len({(row["implementation"], row["op"]) for row in rows}) == len(rows) == 3 * len(peers)
    return {(str(row["implementation"]), str(row["op"])): row for row in rows}


def test_flops() -> None:
    """4 operations per visible pair, head and dimension."""
    batch = batch_of("causal")
    pairs = sum(n * (n + 1) // 2 for n in (37, 1, 80, 20))
    assert batch.flops() == 4 * 4 * 16 * pairs
    assert batch_of("bidirectional").flops() == 4 * 4 * 16 * sum(n * n for n in (37, 1, 80, 20))


class TestMeasure:
    def test_rows_have_percentiles_and_tflops(self) -> None:
        rows = measured(Peer(OURS, ours))
        for op in OPS:
            row = rows[OURS, op]
            assert row["status"] == "ok"
            assert 0 < float(str(row["p20_ms"])) <= float(str(row["p50_ms"])) <= float(str(row["p80_ms"]))
            work = {"forward": 1.0, "backward": 2.5, "both": 3.5}[op] * batch_of("causal").flops()
            assert float(str(row["tflops"])) == pytest.approx(work / float(str(row["p50_ms"])) / 1e9, rel=1e-2)

    @pytest.mark.parametrize(("prepare", "expected"), STATUS)
    def test_status(self, prepare: Any, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows without a figure say why, and others are measured."""
        monkeypatch.setattr(measuring, "PATIENCE", 0.2 if prepare is slow else 60.0)
        rows = measured(Peer("peer", prepare), Peer(OURS, ours))
        for op, status in zip(OPS, expected, strict=True):
            assert str(rows["peer", op]["status"]).startswith(status)
            assert ("p50_ms" in rows["peer", op]) == (status == "ok")
            assert prepare is slow or rows[OURS, op]["status"] == "ok"

    def test_time_limit_leaves_no_alarm(self) -> None:
        with time_limit(3600):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


class TestTiming:
    def test_calls_take_turns(self) -> None:
        order: list[str] = []
        times = time_alternating({name: lambda name=name: order.append(name) for name in "ab"}, CPU, 3)
        assert order == list("ab") * (measuring.WARM_UP + 3)
        assert all(len(t.device) == len(t.host) == 3 and t.error is None for t in times.values())

    def test_enough_repeats_are_five_and_half_a_second(self) -> None:
        assert not Times([200.0] * 4).enough
        assert Times([200.0] * 5).enough
        assert not Times([1.0] * 20).enough

    def test_call_that_raises_is_left_out(self) -> None:
        calls = [0]

        def fails() -> None:
            calls[0] += 1
            raise RuntimeError("no memory")

        times = time_alternating({"fails": fails, "runs": lambda: None}, CPU, 3)
        assert calls == [1]
        assert str(times["fails"].error) == "no memory"
        assert len(times["runs"].device) == 3

    def test_quantiles(self) -> None:
        assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == (1.0, 2.5, 4.0)

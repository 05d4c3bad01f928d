"""The benchmark of attention on a GPU: times, launches and memory are right, and a small run has our figures."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.shapes import case_of
from benchmarks.harness.batch import Shape
from benchmarks.harness.ledger import Ledger, environment, parted
from benchmarks.harness.measure import extra_bytes, launches, time_alternating
from benchmarks.harness.peers import PEERS
from benchmarks.harness.registry import OURS, Call
from benchmarks.harness.run import Budget, run

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def test_clocks() -> None:
    x = torch.randn(64 * 2**20, device="cuda")
    functions = {"copy": x.clone, "two": lambda: x.clone().clone(), "ten": lambda: [x.clone() for _ in range(10)]}
    calls = {name: Call(function) for name, function in functions.items()}
    times = time_alternating(calls, DEVICE, 9)
    copy, two, ten = (sorted(times[name].device)[4] for name in calls)
    assert copy < two < ten
    assert 5 * copy < ten < 15 * copy
    assert sorted(times["ten"].host)[4] < ten  # the host only enqueues
    assert [launches(call) for call in calls.values()] in ([1, 2, 10], [None] * 3)  # None: no profiler here
    assert extra_bytes(calls["copy"]) == 2**28
    assert extra_bytes(calls["two"]) == 2**29


@pytest.mark.parametrize(
    "shape",
    [Shape("flan", 2048), Shape("flan", 2048, causal=False), Shape("one", 2048, window=(256, 0)),
     Shape("tiny", 2048, head_dim=64)],
    ids=str,
)  # fmt: skip
def test_rows_of_a_small_run(shape: Shape, tmp_path: Path) -> None:
    """Prints the status of every peer, so that an adapter for another version is noticed."""
    ledger = Ledger(tmp_path / "attention.csv", environment(DEVICE, "test"))
    peers = [peer for peer in PEERS if not peer.name.startswith("FlexAttention")]  # they take long to compile
    case = case_of(shape, peers, DEVICE)
    assert run([case], ledger, Budget(5), DEVICE) == []
    for benchmark in case.benchmarks:
        row = ledger.find(benchmark, case.text, OURS)
        assert row is not None
        figures = parted(row["figures"])
        assert row["status"] == "ok"
        assert float(row["p50_ms"]) > 0
        assert int(figures.get("launches", 1)) > 0  # absent: no profiler here
        assert float(figures["extra_mib"]) > 0

"""Counts of kernels on the virtual GPU are those that their tiles need."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import virtual_gpu as benchmark
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.tolerance import run

pytestmark = NEEDS


@pytest.mark.slow
def test_counts_are_those_of_whole_tiles() -> None:
    """One bidirectional document of 128 tokens: each query meets each key once, in tiles that it fills."""
    case = Case("square", (128,), heads=1, kv_heads=1, head_dim=64, causal=False)
    with virtual_gpu("sm_90", races=False, preempts=False) as gpu:
        run(make_inputs(case, torch.bfloat16), "triton")
    found = {executable.name: benchmark.counts(executable) for executable in gpu.executables}
    for role, (products, _) in benchmark.NEEDED.items():
        count = found[f"{role}_kernel"]
        assert count.multiply_adds == products * 128 * 128 * 64
        assert count.exponentials >= 128 * 128
        assert count.global_bytes >= 4 * 128 * 64 * 2  # three tensors are read, and one is written
        assert count.reached <= count.lines


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--arch", "sm_90", "--head-dim", "64", "--lengths", "60", "30"])
    printed = capsys.readouterr().out
    assert "2,295 visible pairs" in printed
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= {line.split()[0] for line in printed.splitlines() if line}

"""Compiling ahead: nothing is launched, the time is kept."""

import shutil
import time
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")


from benchmarks.gpu import compile_ahead
from benchmarks.gpu.compile_ahead import DONE, calls_for, compile_only
from benchmarks.gpu.shapes import shapes
from tests.kernels.launches import calls
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.kernels.intervals import transpose_kernel, transposed_intervals

NEEDS = pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="as in tests/kernels")


@pytest.mark.compile
@NEEDS
def test_compile_only() -> None:
    mask = BlockDiagonalMask.from_seqlens([300, 20])
    with fake_gpu() as launches:
        transpose_kernel.device_caches.clear()  # here, because it unloads binaries
        for compiling in (True, False):
            with compile_only() if compiling else nullcontext():
                transposed_intervals(mask.key_start, mask.key_stop, mask.num_keys)
            assert len(launches) == (not compiling)
            assert len(transpose_kernel.device_caches[90][0]) == 1


@pytest.mark.compile
@NEEDS
def test_nothing_runs_in_a_second_call_either() -> None:
    """Its masks and tables have no values, so a kernel that ran would read memory at random places."""
    (call,) = (call for call in calls() if call.name == "causal-bf16")
    for _ in range(2):
        given = call.prepare("cpu")
        with fake_gpu() as launches:
            with compile_only():
                call.launch(given)
            assert launches.kernels == []


def test_shapes_that_are_measured_have_calls() -> None:
    """So that no time of the device goes into compiling them one after the other."""
    names = {call.name for call in calls_for("sm_90")}
    for shape in shapes():
        name = f"shape-{shape.heads}/{shape.kv_heads}x{shape.head_dim}"
        assert (f"{name}-tree-bf16" if shape.trees else f"{name}-bf16") in names
        assert shape.trees or f"gluon-{name}-bf16" in names


@pytest.mark.parametrize(("name", "fails"), [("transpose", False), ("none", True)])
@pytest.mark.compile
@NEEDS
def test_answers(name: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is an answer; after the time nothing is compiled."""
    assert compile_ahead.compile_call(name, "sm_90", time.time() + 60).startswith(DONE) is not fails
    assert compile_ahead.compile_call(name, "sm_90", time.time() - 1) == ""

"""Compiling ahead: nothing is launched, a worker that dies is replaced, the time is kept."""

import shutil
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks.gpu import compile_ahead
from benchmarks.gpu.compile_ahead import DONE, Worker, calls_for, compile_all, compile_only
from benchmarks.gpu.ledger import Budget
from benchmarks.gpu.shapes import shapes
from tests.kernels.launches import calls
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.kernels.intervals import transpose_kernel

WORKER = """
import os, sys
for name in map(str.strip, sys.stdin):
    if name == "dies":
        os.abort()
    print("compiled\\t0.1" if name != "wrong" else "ValueError: no", flush=True)
"""


NEEDS = pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="as in tests/kernels")


@pytest.mark.compile
@NEEDS
def test_compile_only() -> None:
    mask = BlockDiagonalMask.from_seqlens([300, 20])
    with fake_gpu() as launches:
        transpose_kernel.device_caches.clear()  # here, because it unloads binaries
        for compiling in (True, False):
            with compile_only() if compiling else nullcontext():
                mask._transpose()
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


@pytest.mark.parametrize(("arch", "hopper"), [("sm_90", True), ("sm_80", False), ("sm_100", False), ("", False)])
def test_only_hopper_compiles_its_kernels(arch: str, hopper: bool) -> None:
    every = [call.name for call in calls_for("sm_90")]
    assert [call.name for call in calls_for(arch)] == [n for n in every if hopper or not n.startswith("gluon-")]


def test_shapes_that_are_measured_have_calls() -> None:
    """So that no time of the device goes into compiling them one after the other."""
    names = {call.name for call in calls_for("sm_90")}
    for shape in shapes():
        name = f"shape-{shape.heads}/{shape.kv_heads}x{shape.head_dim}"
        assert (f"{name}-tree-bf16" if shape.trees else f"{name}-bf16") in names
        assert shape.trees or f"gluon-{name}-bf16" in names


@pytest.fixture
def _workers_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Worker, arguments: list[str]) -> None:
        self.command, self.process = [sys.executable, "-c", WORKER], None

    monkeypatch.setattr(Worker, "__init__", begin)


@pytest.mark.usefixtures("_workers_without_kernels")
def test_worker_that_dies_is_replaced() -> None:
    answers = compile_all(["a", "dies", "wrong", "b"], 1, Budget(5), [])
    assert answers["dies"] == "the process ended with status -6"
    assert answers["wrong"] == "ValueError: no"
    assert {name for name, answer in answers.items() if answer.startswith(DONE)} == {"a", "b"}


@pytest.mark.usefixtures("_workers_without_kernels")
def test_no_call_begins_after_the_time() -> None:
    assert compile_all(["a", "b"], 2, Budget(0), []) == {}


@pytest.mark.usefixtures("_workers_without_kernels")
@pytest.mark.parametrize(("only", "status"), [("large-lo*-", None), ("tables", 1)])
def test_status(only: str, status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--without-gpu", "sm_90", "--jobs", "1", "--only", only])
    if status is None:
        compile_ahead.main()
        assert capsys.readouterr().out.endswith(f"3 of 3 calls compile under Triton {triton.__version__}\n")
        return
    monkeypatch.setattr(Worker, "compile", lambda self, name: "ValueError: no" if name == "tables" else DONE)
    with pytest.raises(SystemExit) as exit:
        compile_ahead.main()
    assert exit.value.code == status
    assert capsys.readouterr().out.endswith("; failed: tables\n")

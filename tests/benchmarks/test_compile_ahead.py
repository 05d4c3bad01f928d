"""Compiling ahead: nothing is launched, a worker that dies is replaced, the time is kept."""

import shutil
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import compile_ahead
from benchmarks.gpu.compile_ahead import DONE, Worker, compile_all, compile_only
from benchmarks.gpu.ledger import Budget
from tests.kernels.fake_driver import fake_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.kernels.intervals import transpose_kernel

WORKER = """
import os, sys
for name in map(str.strip, sys.stdin):
    if name == "dies":
        os.abort()
    print("compiled\\t0.1" if name != "wrong" else "ValueError: no", flush=True)
"""


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="as in tests/kernels")
def test_compile_only() -> None:
    mask = BlockDiagonalMask.from_seqlens([300, 20])
    with fake_gpu() as launches:
        transpose_kernel.device_caches.clear()  # here, because it unloads binaries
        with compile_only():
            mask._transpose()
        assert len(launches) == 0
        assert len(transpose_kernel.device_caches[90][0]) == 1
        mask._transpose()
        assert len(launches) == 1
        assert len(transpose_kernel.device_caches[90][0]) == 1


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
@pytest.mark.parametrize(("only", "status"), [("large-long", None), ("tables", 1)])
def test_status(only: str, status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--without-gpu", "sm_90", "--jobs", "1", "--only", only])
    if status is None:
        compile_ahead.main()
        assert capsys.readouterr().out.endswith("3 of 3 calls compile\n")
        return
    monkeypatch.setattr(Worker, "compile", lambda self, name: "ValueError: no" if name == "tables" else DONE)
    with pytest.raises(SystemExit) as exit:
        compile_ahead.main()
    assert exit.value.code == status
    assert capsys.readouterr().out.endswith("2 of 3 calls compile; failed: tables\n")

"""The tuner: its candidates, their order, its choice, and a process for each."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import tune
from benchmarks.harness.ledger import ABOUT, Ledger
from benchmarks.harness.run import Budget
from benchmarks.tune import Candidate, fastest, in_order, shipped, times_of, try_all, try_in_process
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import kernels
from tritonpack.kernels import tile_shapes
from tritonpack.kernels.tile_shapes import Kernel, TileShape, select_tile

HERE = dict.fromkeys(ABOUT, "") | {"commit": "abc1234"}
WANTED = TileShape(64, 32, 4, 3)
PYTHON, ROOT = sys.executable, Path(__file__).parents[2]
TODO = tuple(Candidate("forward", 128, tile) for tile in in_order("forward", 128, "sm_90")[:4])


def test_candidates_begin_with_the_shipped_tile_and_its_neighbours() -> None:
    order = in_order("forward", 128, "sm_90")
    assert order[0] == shipped("forward", 128, "sm_90") == select_tile("forward", 128, torch.bfloat16, "sm_90")
    assert WANTED in order
    assert len(set(order)) == len(order)
    changed = [sum(a != b for a, b in zip(vars(t).values(), vars(order[0]).values(), strict=True)) for t in order]
    assert changed[1:4] == [1, 1, 1]


def test_fastest_tile_wins() -> None:
    own = shipped("forward", 128, "sm_90")
    assert fastest([own, WANTED], {WANTED: 1.0, own: 2.0}) == WANTED
    assert fastest([own, WANTED], {own: 2.0}) == own
    assert fastest([own, WANTED], {}) is None
    assert fastest([own, WANTED], {own: 2.0, WANTED: 1.0}, block_n=own.block_n) == own


class TestTable:
    def test_second_run_continues_the_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Candidate] = []

        def outcome(candidate: Candidate, *_: Any) -> tuple[str, float | None]:
            tried.append(candidate)
            return ("ok", 3.0) if candidate != TODO[1] else ("misaligned address", None)

        monkeypatch.setattr(tune, "try_in_process", outcome)
        path = tmp_path / "tiles.csv"
        assert try_all(TODO[:2], Ledger(path, HERE), 100, 2, Budget(5)) == 0
        assert try_all(TODO, Ledger(path, HERE), 100, 2, Budget(0)) == 2
        assert try_all(TODO, Ledger(path, HERE), 100, 2, Budget(5)) == 0
        assert len(tried) == len(TODO)
        assert set(tried) == set(TODO)
        assert times_of(Ledger(path, HERE), TODO, 100) == {c.tile: 3.0 for c in TODO if c != TODO[1]}
        assert times_of(Ledger(path, HERE), TODO, 200) == {}


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="as in tests/kernels")
@pytest.mark.parametrize("kernel", ["forward", pytest.param("dq", marks=pytest.mark.slow)])
def test_candidate_is_the_tile_that_runs(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing has results or a time."""
    monkeypatch.setattr(tune, "check_backend", lambda inputs, backend: None)
    monkeypatch.setattr(tune.triton.testing, "do_bench", lambda run, **_: run() and 1.5)
    monkeypatch.setattr(tile_shapes, "_loaded", {})
    tile = TileShape(128, 32, 4 if shipped(kernel, 64, "sm_90").num_warps == 8 else 8, 2)
    with fake_gpu() as launches, monkeypatch.context() as patch:
        patch.setattr(kernels, "serve", lambda x: False)  # a mask is made here, too
        assert tune.try_here(Candidate(kernel, 64, tile), 300, tmp_path / "lock", "cpu") == 1.5
        ours = [launch for launch in launches if launch.kernel == f"{kernel}_kernel"]
        assert {launch.threads for launch in ours} == {32 * tile.num_warps}


class TestProcess:
    candidate = Candidate("forward", 128, WANTED)

    @pytest.mark.parametrize(
        ("program", "expected"),
        [
            ("print('chatter'); print(1.25)", ("ok", 1.25)),
            ("raise RuntimeError('misaligned address')", ("RuntimeError: misaligned address", None)),
            ("import os; os.abort()", ("exit status -6", None)),
            ("import time; time.sleep(600)", ("not ready after 1 seconds", None)),
        ],
    )
    def test_outcome(
        self, program: str, expected: tuple[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A program stands for Python and the module."""
        path = tmp_path / "python"
        path.write_text(f"#!{PYTHON}\n{program}\n")
        path.chmod(0o755)
        monkeypatch.setattr(tune.sys, "executable", str(path))
        monkeypatch.setattr(tune, "PATIENCE", 1.0 if "sleep" in program else 60.0)
        assert try_in_process(self.candidate, 100, tmp_path / "lock") == expected

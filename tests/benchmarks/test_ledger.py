"""The ledger: the rows that it writes, and those that count as measured before."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.ledger import ABOUT, CODE, COLUMNS, LOST, OPS, Ledger, commit_here, environment
from benchmarks.harness.batch import Shape

HERE = dict.fromkeys(ABOUT, "") | {"device": "a GPU", "commit": "abc1234", "torch": "2.11.0"}
SHAPE = Shape("flan", 32768, window=(4096, 0)).columns()


def filled(path: Path, about: dict[str, str] = HERE, status: str = "ok", ops: tuple[str, ...] = OPS) -> Ledger:
    ledger = Ledger(path, about)
    for op in ops:
        ledger.write({**SHAPE, "op": op, "implementation": "x", "status": status, "p50_ms": 1.5, "launches": None})
    return ledger


def test_rows_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "new" / "attention.csv"
    filled(path, ops=("forward",))
    filled(path, ops=("backward",))  # a second run appends
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == COLUMNS
    assert (first["op"], second["op"]) == ("forward", "backward")
    assert (first["window"], first["tokens"], first["p50_ms"], first["launches"]) == ("4096 0", "32768", "1.5", "")
    assert (first["commit"], first["torch"], first["device"]) == ("abc1234", "2.11.0", "a GPU")
    assert first["date"].endswith("Z")


def test_rows_that_count_as_measured(tmp_path: Path) -> None:
    """All of a shape, from the same environment; also those without a figure, and of a peer that lost the device."""
    path = tmp_path / "attention.csv"
    assert not filled(path, ops=OPS[:2]).finished(SHAPE, ["x"])
    filled(path, ops=OPS[2:], status=f"{LOST}: RuntimeError: an illegal memory access")
    ledger, other = Ledger(path, HERE), Shape("flan", 32768).columns()
    assert [ledger.finished(*of) for of in ((SHAPE, ["x"]), (SHAPE, ["x", "y"]), (other, ["x"]))] == [
        True,
        False,
        False,
    ]
    assert [ledger.lost(*of) for of in ((SHAPE, "x"), (SHAPE, "y"), (other, "x"))] == [True, False, False]
    for changed in ({"commit": "def5678"}, {"torch": "2.13.0"}, {"xformers": "0.0.35"}):
        assert not Ledger(path, HERE | changed).finished(SHAPE, ["x"])


def test_names_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit, also of a clone of another user; a digest after a change, and where there is no repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for folder in CODE:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    alone = commit_here(tmp_path)
    assert re.fullmatch(r"unknown\+[0-9a-f]{8}", alone)
    (tmp_path / "benchmarks" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "tritonpack" / ".#a.py").symlink_to("nowhere")
    assert commit_here(tmp_path) == alone, "what an editor leaves is no code"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "benchmarks" / "results").mkdir()
    (tmp_path / "benchmarks" / "results" / "x.csv").write_text("1\n")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert commit_here(tmp_path) == commit
    seen = set()
    for text in ("x = 2\n", "x = 3\n"):
        (tmp_path / "tritonpack" / "a.py").write_text(text)
        seen.add(commit_here(tmp_path))
    assert len(seen) == 2
    assert all(re.fullmatch(rf"{commit}\+[0-9a-f]{{8}}", name) for name in seen)


def test_file_with_other_columns_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    path.write_text("op,milliseconds\n")
    with pytest.raises(SystemExit, match="other columns"):
        Ledger(path, HERE)
    assert path.read_text() == "op,milliseconds\n"


def test_environment() -> None:
    about = environment(torch.device("cpu"), "abc1234")
    assert tuple(about) == ABOUT
    assert about["commit"] == "abc1234"
    assert about["torch"] == torch.__version__
    assert "CPU" in about["device"]
    assert environment(torch.device("cpu"))["commit"]

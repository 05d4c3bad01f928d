"""The ledger: the rows that it writes, and those that count as measured before."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.ledger import (
    CODE,
    COLUMNS,
    Ledger,
    commit_here,
    joined,
    parted,
    read,
)

HERE = {"device": "a GPU", "commit": "abc1234", "versions": "torch=2.11.0"}
CASE = joined({"documents": "agent, 6 turns", "window": "", "tokens": 32768, "trees": None})


def filled(path: Path, *benchmarks: str, **columns: object) -> Ledger:
    ledger = Ledger(path, HERE)
    for benchmark in benchmarks:
        row = {"benchmark": benchmark, "case": CASE, "implementation": "x", "status": "ok"}
        ledger.write(row | columns)
    return ledger


def test_rows_on_disk(tmp_path: Path) -> None:
    """Every run appends; the last row of a measurement counts."""
    path = tmp_path / "new" / "attention.csv"
    filled(path, "forward", p50_ms=1.5)
    filled(path, "backward", "forward", figures="launches=3")
    with path.open(newline="") as file:
        first, *others = csv.DictReader(file)
    assert tuple(first) == COLUMNS
    assert (first["benchmark"], first["p50_ms"], first["figures"]) == ("forward", "1.5", "")
    assert parted(first["case"]) == {"documents": "agent, 6 turns", "tokens": "32768"}
    assert HERE.items() <= first.items()
    assert first["date"].endswith("Z")
    assert read(path) == [others[1], others[0]]


def test_rows_that_count_as_measured(tmp_path: Path) -> None:
    """Those of the same environment, with a figure or without."""
    path = tmp_path / "attention.csv"
    filled(path, "forward", status="ValueError: no")
    ledger = Ledger(path, HERE)
    found = ledger.find("forward", CASE, "x")
    assert found is not None
    assert (found["status"], ledger.rows()) == ("ValueError: no", [found])
    for other in (("backward", CASE, "x"), ("forward", "documents=y", "x"), ("forward", CASE, "y")):
        assert ledger.find(*other) is None
    for changed in ({"commit": "def5678"}, {"versions": "torch=2.13.0"}, {"device": "another"}):
        assert Ledger(path, HERE | changed).rows() == []


def test_names_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit, also of a clone of another user; a digest after a change, and where there is no repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for folder in CODE:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    alone = commit_here(tmp_path)
    assert re.fullmatch(r"unknown\+[0-9a-f]{8}", alone)
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
    with pytest.raises(SystemExit, match="its columns aren't benchmark, case, "):
        Ledger(path, HERE)
    assert path.read_text() == "op,milliseconds\n"
    with pytest.raises(SystemExit, match="doesn't exist"):
        read(tmp_path / "none.csv")

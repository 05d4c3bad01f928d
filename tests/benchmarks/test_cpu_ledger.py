"""The CPU ledger: rows of pytest-benchmark's report, rows of several runs, the table and the picture."""

import os

import pytest

pytest.importorskip("rich")
pytest.importorskip("pytest_benchmark")

from rich.console import Console

from benchmarks.cpu import __main__ as ledger

ABOUT = {"device": "a CPU", "threads": "2", "python": "3.11", "torch": "2.13", "commit": "abc", "date": "then"}


def found(name, params, median, group=None):
    return {
        "name": name, "params": params, "group": group,
        "stats": {"min": median / 2, "median": median, "iqr": median / 4, "rounds": 5},
    }  # fmt: skip


REPORT = {
    "benchmarks": [
        found("test_attention[flan-tritonpack-forward]",
              {"case": "flan", "implementation": "tritonpack", "direction": "forward"}, 0.010, "attention forward"),
        found("test_attention[flan-sdpa-forward]",
              {"case": "flan", "implementation": "sdpa", "direction": "forward"}, 0.025, "attention forward"),
        found("test_pack[8192-1000000]", {"capacity": 8192, "documents": 1000000}, 0.033),
        found("test_whole", None, 1.0),
    ]
}  # fmt: skip


def test_each_benchmark_has_a_row():
    ours, sdpa, pack, whole = ledger.rows_of(REPORT, ABOUT)
    assert (ours["group"], ours["case"], ours["implementation"]) == ("attention forward", "flan", "tritonpack")
    assert (ours["min_ms"], ours["median_ms"], ours["iqr_ms"], ours["rounds"]) == ("5.0000", "10.0000", "2.5000", "5")
    assert sdpa["implementation"] == "sdpa"
    assert (pack["group"], pack["case"], pack["implementation"]) == ("pack", "8192 1000000", "tritonpack")
    assert (whole["group"], whole["case"]) == ("whole", "")
    assert all(tuple(row) == ledger.COLUMNS for row in (ours, sdpa, pack, whole))


def test_table_has_ratios_to_tritonpack():
    console = Console(width=200)
    with console.capture() as capture:
        console.print(ledger.table(list(ledger.rows_of(REPORT, ABOUT))))
    assert "2.50" in next(line for line in capture.get().splitlines() if "sdpa" in line)


def test_latest_row_of_each_case(tmp_path):
    path = tmp_path / "new" / "cpu.csv"
    ledger.append(path, ledger.COLUMNS, ledger.rows_of(REPORT, ABOUT))
    again = {"benchmarks": [found("test_whole", None, 3.0)]}
    ledger.append(path, ledger.COLUMNS, ledger.rows_of(again, ABOUT))
    assert len(path.read_text().splitlines()) == 1 + 4 + 1
    medians = {row["group"]: row["median_ms"] for row in ledger.latest(path)}
    assert medians["whole"] == "3000.0000"
    assert len(medians) == 3


@pytest.mark.slow
def test_measures_and_writes(tmp_path, capsys, monkeypatch):
    """The whole command, on the quickest benchmark."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # the inner pytest isn't a worker of this one
    with pytest.raises(SystemExit) as ended:
        ledger.main(["--out", str(tmp_path), "-k", "test_build and transpose"])
    assert ended.value.code == 0
    (row,) = ledger.latest(tmp_path / "cpu.csv")
    assert (row["group"], row["case"]) == ("masks, 131072 tokens", "transpose")
    assert float(row["median_ms"]) > 0
    capsys.readouterr()
    ledger.main(["--out", str(tmp_path), "--table"])
    assert "transpose" in capsys.readouterr().out


def test_runs_without_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ledger.subprocess, "run", lambda command, **_: ledger.subprocess.CompletedProcess(command, 5))
    with pytest.raises(SystemExit):
        ledger.main(["--out", str(tmp_path), "-k", "no_such_benchmark"])
    assert not (tmp_path / "cpu.csv").exists()
    with pytest.raises(SystemExit):
        ledger.main(["--out", str(tmp_path), "--table"])
    assert "doesn't exist" in capsys.readouterr().err

import csv
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from tests.cli.command import run
from tritonpack import varlen_attention
from tritonpack.cli.bench import command, peers
from tritonpack.cli.bench.measure import OPS, DeviceLostError

SMALL = ("--tokens", "96", "--heads", "4", "--head-dim", "16", "--repeats", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.heavy
def test_table_csv_and_picture(capsys, tmp_path):
    assert run("bench", *SMALL, "--out", str(tmp_path / "new")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert " CPU, 1 thread, torch " in captured.out
    assert "96 tokens, 4 query heads and 1 key head of 16, float32, causal; " in captured.out
    for name in ("tritonpack", "sdpa, padded", "sdpa, dense mask"):
        assert len(re.findall(rf"│ {name} +(│ +[\d.]+ \([\d.]+-[\d.]+\) ){{3}}│ +[\d.]+x", captured.out)) == 4
    assert captured.out.count("1.00x") >= 4
    with (tmp_path / "new" / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 3 * 3
    assert {row["status"] for row in rows} == {"ok"}
    assert all(0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) for row in rows)
    assert {(row["tokens"], row["repeats"], row["backend"]) for row in rows} == {("96", "1", "blocked")}
    assert len({row["distribution"] for row in rows}) == 4
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
def test_wrong_results_are_not_timed_and_exit_with_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "varlen_attention", lambda *a: varlen_attention(*a) * 1.001)
    assert run("bench", *SMALL, "--out", str(tmp_path)) == 1
    output = capsys.readouterr().out
    assert re.search(r"│ tritonpack +│ +not timed │ +not timed │ +not timed │", output)
    assert re.search(r"Not timed: tritonpack, one document: AssertionError: out.* beyond twice plain", output)
    assert "x │" not in output
    with (tmp_path / "bench.csv").open() as file:
        assert all(not row["p50_ms"] for row in csv.DictReader(file) if row["implementation"] == "tritonpack")


def test_lost_device_ends_the_run_and_keeps_rows(capsys, monkeypatch, tmp_path):
    def breaks(batch, peers, write, repeats):
        write({"op": "forward", "implementation": "tritonpack", "status": "the device was lost: RuntimeError: [no]"})
        raise DeviceLostError("tritonpack: RuntimeError: [no]")

    monkeypatch.setattr(command, "measure", breaks)
    assert run("bench", *SMALL, "--out", str(tmp_path)) == 1
    output = capsys.readouterr().out
    assert "The GPU is lost to this process: tritonpack: RuntimeError: [no]" in output
    assert output.count("Not timed: tritonpack, one document: the device was lost: RuntimeError: [no]") == 1
    assert len((tmp_path / "bench.csv").read_text().splitlines()) == 2


def rows_of(distribution, documents, implementation, times=(), status="ok"):
    about = {"distribution": distribution, "documents": documents, "implementation": implementation, "status": status}
    figures = dict(zip(("p20_ms", "p50_ms", "p80_ms"), times, strict=False))
    return [{**about, "op": op, **figures} for op in OPS]


def test_ratios_are_relative_to_tritonpack(capsys):
    rows = [
        *rows_of("short", 3, "tritonpack", (1, 1, 1)),
        *rows_of("short", 3, "other", (2, 3, 4.567)),
        *rows_of("short", 3, "absent", status="not installed: No module named 'absent'"),
        *rows_of("long", 1, "tritonpack", status="ValueError: [no]"),
        *rows_of("long", 1, "other", (2, 3, 4.567)),
    ]
    Console(width=200).print(command.table(rows))
    output = capsys.readouterr().out
    assert re.search(r"short \(3\) │ tritonpack +│ 1.00 \(1.00-1.00\) .* │ +1.00x", output)
    assert re.search(r"│ other +│ 3.00 \(2.00-4.57\) .* │ +3.00x", output)
    assert re.search(r"long \(1\) +│ tritonpack +│ +not timed", output)
    assert "absent" not in output
    assert command.not_timed(rows[6]) == "Not installed: absent"
    assert command.not_timed(rows[9]) == "Not timed: tritonpack, long: ValueError: [no]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "3"], "--tokens"),
        (["--head-dim", "1000"], "--head-dim must be from 1 to 512; got 1000"),
        (["--device", "cuda"], "torch sees no GPU here"),
        (["--dtype", "int8"], "--dtype"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_wrong_options_exit_with_2(arguments, message, capsys):
    assert run("bench", *arguments) == 2
    assert message in capsys.readouterr().err

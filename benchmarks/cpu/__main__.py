"""Run the benchmarks that need no GPU with pytest-benchmark, and append rows to benchmarks/results/cpu.csv.

    python -m benchmarks.cpu [--out DIR] [-k EXPRESSION] [--table]

They measure packing, masks, the cost of a patch, the host's time of a layer on a GPU, and attention beside sdpa, padded
and with a dense mask. A table shows each median, and the time of other implementations relative to tritonpack's.
`--table` measures nothing and prints the latest rows of the file. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.ledger import append, environment, now

FOLDERS = ("benchmarks/cpu", "benchmarks/packing")
OURS = "tritonpack"
ABOUT = ("device", "threads", "python", "torch", "commit", "date")
COLUMNS = ("group", "case", "implementation", "min_ms", "median_ms", "iqr_ms", "rounds", *ABOUT)

Row = dict[str, str]


def rows_of(report: Mapping[str, Any], about: Mapping[str, str]) -> Iterator[Row]:
    """The rows of a report in pytest-benchmark's JSON; a case is all parameters but implementation and direction."""
    for found in report["benchmarks"]:
        parameters = dict(found["params"] or {})
        implementation = parameters.pop("implementation", OURS)
        parameters.pop("direction", None)  # which the name of the group has
        test = found["name"].split("[")[0].removeprefix("test_")
        times = {name: f"{1e3 * found['stats'][name]:.4f}" for name in ("min", "median", "iqr")}
        yield {
            "group": found["group"] or test,
            "case": " ".join(str(parameters[name]) for name in sorted(parameters)),
            "implementation": implementation,
            "min_ms": times["min"],
            "median_ms": times["median"],
            "iqr_ms": times["iqr"],
            "rounds": str(found["stats"]["rounds"]),
            **about,
        }


def latest(path: Path) -> list[Row]:
    """The rows of a ledger; if a measurement was repeated, its last row."""
    with path.open(newline="") as file:
        return list({(r["group"], r["case"], r["implementation"]): r for r in csv.DictReader(file)}.values())


def table(rows: Sequence[Row]) -> Table:
    """Medians, and the time of other implementations relative to tritonpack's in the same case."""
    ours = {(r["group"], r["case"]): float(r["median_ms"]) for r in rows if r["implementation"] == OURS}
    shown = Table("group", "case", "implementation", "median ms", "quartiles apart", "times ours")
    before = None
    for row in sorted(rows, key=lambda r: (r["group"], r["case"], r["implementation"] != OURS, r["implementation"])):
        base = ours.get((row["group"], row["case"]))
        ratio = "" if base is None or row["implementation"] == OURS else f"{float(row['median_ms']) / base:.2f}"
        if before is not None and before != row["group"]:
            shown.add_section()
        before = row["group"]
        shown.add_row(
            row["group"], row["case"], row["implementation"], f"{float(row['median_ms']):.3f}",
            f"{float(row['iqr_ms']):.3f}", ratio,
        )  # fmt: skip
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of cpu.csv")
    parser.add_argument("-k", dest="expression", default="", help="selects benchmarks, like pytest's -k")
    parser.add_argument("--table", action="store_true", help="print the latest rows and measure nothing")
    options = parser.parse_args(arguments)
    path, console = options.out / "cpu.csv", Console(width=None if sys.stdout.isatty() else 140)
    if options.table:
        if not path.exists():
            parser.error(f"{path} doesn't exist; without --table it is written.")
        console.print(table(latest(path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", "--benchmark-disable-gc", "-p", "no:xdist"]
        command += ["--benchmark-columns=median", f"--benchmark-json={report}", *FOLDERS, "-k", options.expression]
        ended = subprocess.run(command, check=False).returncode
        if not report.exists():
            raise SystemExit(ended or f"pytest measured nothing; -k {options.expression!r} selects no benchmark.")
        about = {**environment(torch.device("cpu")), "threads": str(torch.get_num_threads()), "date": now()}
        about = {name: about[name] for name in ABOUT} | {"device": _processor()}
        rows = list(rows_of(json.loads(report.read_text()), about))
    append(path, COLUMNS, rows)
    console.print(table(rows))
    console.print(f"Rows: {path}")
    raise SystemExit(ended)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


if __name__ == "__main__":
    main()

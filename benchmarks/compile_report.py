"""Compile every kernel that can be launched for its GPU, without the hardware, and print what the binaries hold.

    python -m benchmarks.compile_report [--gpu sm_90] [--only dq-] [--csv FILE] [--jobs 2]

Rows of the file that are up to date are printed as they are; others are compiled and stored. tests/kernels/lint.py has
the configurations, what is wrong with a row, and when it is up to date.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import triton
from triton import knobs

from tests.kernels.aot import Configuration, Resources, compile_configuration
from tests.kernels.lint import SHARED_KIB, findings, key, launchable

Row = dict[str, str]

ROWS = Path(__file__).parent / "results" / "compile.csv"
COLUMNS = (
    "triton", "configuration", "key", "findings", "minor", "tile", "registers", "shared_bytes", "instructions",
    "matrix_instructions", "spills", "loop_instructions", "loop_spills", "loop_barriers",
    "loop_waits", "error",
)  # fmt: skip

HEADER = (
    f"{'configuration':38} {'tile':>19} {'registers':>9} {'KiB':>6} {'instructions':>12} {'matrix':>6} {'spills':>6} "
    f"{'in each loop':>15} {'barriers':>11}"
)


def make_row(configuration: Configuration, resources: Resources | str) -> Row:
    """A row of the file. The loops are in the order of the code."""
    found = findings(configuration, resources)
    row = {
        "triton": triton.__version__,
        "configuration": str(configuration),
        "key": key(configuration),
        "findings": "; ".join(finding.text for finding in found if not finding.is_minor),
        "minor": "; ".join(finding.text for finding in found if finding.is_minor),
        "tile": tile_name(configuration),
    }
    if isinstance(resources, str):
        return row | {"error": resources}
    loops = {
        f"loop_{name}": " ".join(str(getattr(loop, name)) for loop in resources.loops)
        for name in ("instructions", "spills", "barriers", "waits")
    }
    facts = ("registers", "shared_bytes", "instructions", "matrix_instructions", "spills")
    return row | {name: str(getattr(resources, name)) for name in facts} | loops


def tile_name(configuration: Configuration) -> str:
    """The tile of a configuration: "128x64 w8 s2 h4 d" (h heads, deferred, queries left, pointers)."""
    tile = configuration.tile
    heads = f" h{tile.heads}" if tile.heads > 1 else ""
    flags = {"d": tile.deferred, "l": tile.queries_left, "p": tile.by_pointers}
    letters = "".join(f" {letter}" for letter, is_set in flags.items() if is_set)
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{heads}{letters}"


def compile_rows(configurations: Sequence[Configuration], jobs: int) -> Iterator[Row]:
    """The rows as they are ready. Each is compiled in a process of its own, because a compiler may end its process."""
    context = get_context("fork")
    waiting = list(reversed(configurations))
    running: dict[Any, tuple[Configuration, Any]] = {}  # by the end of a pipe that receives
    while waiting or running:
        while waiting and len(running) < jobs:
            end, sender = context.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(waiting[-1], sender))
            process.start()
            sender.close()
            running[end] = waiting.pop(), process
        for ready in wait([*running]):
            configuration, process = running.pop(ready)
            resources: Resources | str
            try:
                resources = cast("Connection", ready).recv()
            except EOFError:
                resources = "the compiler ended its process"
            process.join()
            yield make_row(configuration, resources)


def _compile(configuration: Configuration, sender: Any) -> None:
    with TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        try:
            sender.send(compile_configuration(configuration))
        except Exception as error:  # a compiler may raise anything; the row has the message
            lines = str(error).strip().splitlines() or [""]
            sender.send(f"{type(error).__name__}: {lines[-1][:120]}")


def read_rows(path: Path = ROWS) -> list[Row]:
    """The rows of a file, of all versions of Triton; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file by these rows, sorted by version and as `launchable`, without those that aren't in it."""
    order = {str(configuration): number for number, configuration in enumerate(launchable())}
    kept = [row for row in rows if row["configuration"] in order]
    kept.sort(key=lambda row: (row["triton"], order[row["configuration"]]))
    written = path.with_suffix(".new")
    with written.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    written.replace(path)


def stale(
    rows: Iterable[Row], configurations: Iterable[Configuration], version: str = triton.__version__
) -> list[Configuration]:
    """The configurations whose row under a version of Triton is absent or was made from another code or tile."""
    made = {row["configuration"]: (row["key"], row["tile"]) for row in rows if row["triton"] == version}
    return [c for c in configurations if made.get(str(c)) != (key(c), tile_name(c))]


def show(row: Row) -> str:
    """A line of the printed table."""
    begin = f"{row['configuration']:38} {row['tile']:>19} "
    if row.get("error"):
        return begin + row["error"]
    kib = int(row["shared_bytes"]) / 1024
    return (
        f"{begin}{row['registers']:>9} {kib:6.1f} {row['instructions']:>12} {row['matrix_instructions']:>6} "
        f"{row['spills']:>6} {row['loop_spills']:>15} {row['loop_barriers']:>11} "
        f"{'; '.join(filter(None, (row['findings'], row['minor']))) or 'clean'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=SHARED_KIB, help="one GPU only")
    parser.add_argument("--only", default="", help="configurations whose name has this text")
    parser.add_argument("--csv", type=Path, default=ROWS, help="the file of the rows")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args(arguments)
    chosen = [c for c in launchable() if options.gpu in (None, c.gpu) and options.only in str(c)]
    rows = read_rows(options.csv)
    print(f"Triton {triton.__version__}\n{HEADER}")
    waiting = stale(rows, chosen)
    names = {str(c) for c in chosen} - {str(c) for c in waiting}
    found = [row for row in rows if row["triton"] == triton.__version__ and row["configuration"] in names]
    for row in found:
        print(show(row))
    for row in compile_rows(waiting, options.jobs):
        print(show(row), flush=True)
        found.append(row)
        same = (row["triton"], row["configuration"])
        rows = [*(r for r in rows if (r["triton"], r["configuration"]) != same), row]
        write_rows(options.csv, rows)  # now, so that a run that was interrupted can continue
    clean = sum(not row["findings"] + row["minor"] for row in found)
    print(f"{len(found)} configurations, {clean} are clean, {sum(not row['findings'] for row in found)} in their loops")


if __name__ == "__main__":
    main()

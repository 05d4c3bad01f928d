"""The table of a run, in Markdown, to be pasted into an issue."""

from __future__ import annotations

import csv
from pathlib import Path
from textwrap import shorten

from benchmarks.harness.batch import Shape
from benchmarks.harness.ledger import ABOUT
from benchmarks.harness.measure import NOT_INSTALLED, OPS
from benchmarks.harness.peers import PEERS


def table(path: Path, about: dict[str, str], shapes: list[Shape], ceiling: float | None) -> str:
    """The useful TFLOP/s of each implementation, at each shape and in each direction, from the rows of a CSV.

    Args:
        path: the CSV of `benchmarks.gpu`.
        about: the environment whose rows count.
        shapes: in the order of the table.
        ceiling: TFLOP/s of a matrix product on this GPU, of which the table says the share; None on a CPU.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] == about[name] for name in ABOUT)]
    rows = [row for row in rows if not row["status"].startswith(NOT_INSTALLED)]
    present = {row["implementation"] for row in rows}
    names = [peer.name for peer in PEERS if peer.name in present]
    lines = [
        ", ".join(f"{name} {value}" for name, value in about.items() if value),
        "",
        "Useful TFLOP/s (visible pairs alone; backward is 2.5 forwards)"
        + (f", and the share of a bf16 matrix product's {ceiling:.0f}" if ceiling else ""),
        "",
        f"| documents, tokens, heads | direction | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for shape in shapes:
        columns = shape.columns().items()
        of_shape = [row for row in rows if columns <= row.items()]
        for op in OPS:
            found = {row["implementation"]: row for row in of_shape if row["op"] == op}
            if found:
                cells = (_cell(found.get(name), ceiling) for name in names)
                lines.append(f"| {shape} | {op} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, str] | None, ceiling: float | None) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return shorten(row["status"], 60, placeholder=" ...").replace("|", "/")
    rate = float(row["tflops"])
    return f"{rate:.3g} ({rate / ceiling:.0%})" if ceiling else f"{rate:.3g}"

"""Write a page about the compile report under several versions of Triton.

    python -m benchmarks.compile_matrix [--versions 3.6.0 3.9.0] [--out docs/compile-matrix.md]

Each version is downloaded once, without its dependencies, to a folder that precedes the installed version on the path.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
FOLDER = Path(".matrix")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def report(version: str) -> list[dict[str, str]]:
    """The rows of a version's report. An existing file of them is read."""
    target, rows = FOLDER / version, FOLDER / f"{version}.csv"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), f"triton=={version}"]
        subprocess.run(pip, check=True)
    if not rows.exists():
        environment = os.environ | {"PYTHONPATH": str(target.resolve()), "TRITON_DEFAULT_FP_FUSION": "1"}
        subprocess.run(
            [sys.executable, "-m", "benchmarks.compile_report", "--csv", str(rows)], check=True, env=environment
        )
    with rows.open(newline="") as file:
        return list(csv.DictReader(file))


def verdict(row: dict[str, str]) -> str | None:
    """The defect of a row, or None."""
    if row.get("error"):
        return "doesn't compile"
    float32 = row["configuration"].endswith("fp32")
    if int(row["spills"]):
        return f"{row['spills']} spills"
    if int(row["instructions"]) < 100 or not (float32 or int(row["matrix_instructions"])):
        return "no matrix instructions"
    return None


def page(reports: dict[str, list[dict[str, str]]]) -> str:
    """The page: how many configurations are clean, and the defects of the others."""
    lines = [
        "# What each version of Triton makes of the kernels",
        "",
        "Written by `python -m benchmarks.compile_matrix` (`make compile-matrix`): every shipped configuration,",
        "compiled ahead of time, not run. Clean means no spilled register and, but for float32, matrix",
        "instructions.",
        "",
        "| clean configurations | " + " | ".join(f"Triton {version}" for version in reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    for arch in ARCHITECTURES:
        cells = []
        for rows in reports.values():
            of_arch = [row for row in rows if f"-{arch}-" in row["configuration"]]
            cells.append(f"{sum(verdict(row) is None for row in of_arch)} of {len(of_arch)}")
        lines.append(f"| {arch} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## The others",
        "",
        "| configuration | " + " | ".join(reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    names = dict.fromkeys(row["configuration"] for rows in reports.values() for row in rows)
    by_name = {version: {row["configuration"]: row for row in rows} for version, rows in reports.items()}
    for name in names:
        cells = [verdict(rows[name]) or "clean" for rows in by_name.values()]
        if set(cells) != {"clean"}:
            short = name.replace("softcap-sinks-alibi-dropout", "features")
            lines.append(f"| {short} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--out", type=Path, default=Path("docs/compile-matrix.md"))
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    options.out.write_text(page({version: report(version) for version in options.versions}), encoding="utf-8")
    print(f"{options.out} written")


if __name__ == "__main__":
    main()

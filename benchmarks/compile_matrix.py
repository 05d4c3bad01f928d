"""Bring the compile report up to date under several versions of Triton, and write the page about it.

    python -m benchmarks.compile_matrix [--versions 3.6.0 3.9.0] [--jobs 2]

Rows are compiled only if the kernel's code or its tile has changed, so a second run goes on where the first stopped. A
version that isn't installed is downloaded once, without its dependencies, to a folder that precedes the installed one
on the path.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import triton

from benchmarks.compile_report import Row, read_rows
from tests.kernels.lint import SHARED_KIB

VERSIONS = ("3.6.0", "3.9.0")
FOLDER = Path(__file__).parents[1] / ".matrix"
PAGE = Path(__file__).parents[1] / "docs" / "compile-matrix.md"

INTRODUCTION = """\
After this page you know which kernels compile well for which GPU, and what is wrong with the others.
`make compile-matrix` (`python -m benchmarks.compile_matrix`) writes it from `benchmarks/results/compile.csv`, which
also has float32 and other head dimensions. Kernels are compiled for each GPU ahead of time, with what Triton's
launcher says of their arguments; none has run. A binary is clean if it

- multiplies in a loop, by matrix instructions if the type has 16 bits,
- fits into the GPU's shared memory,
- spills no registers.

A cell counts clean binaries, then these and those that spill only outside of their loops, then all.

On AMD GPUs Triton addresses tensors with 32 bits, by buffer instructions, unless a tensor's storage has more than 2
GiB. For such tensors it compiles another binary: the rows that end in `large`, of plain attention in bfloat16 at head
dimensions 64 and 128.

Of AMD GPUs with tiles of their own (gfx942, gfx1100, gfx1201) plain attention in bfloat16 is compiled at head
dimensions 64, 128, 256 and 512, with each feature at 64 and 128, and in float32 at 128; of gfx1201 features at 64
alone, and no float32. gfx908, gfx90a and gfx950 use the tiles of gfx942, gfx1151 those of gfx1100, and gfx1200 those of
gfx1201; of them plain attention in bfloat16 at 64 and 128 is compiled. Other GPUs use the tiles of a relative and
aren't compiled here: sm_87 and sm_110 (sm_80; Triton 3.6 has no assembler for sm_110), sm_121 (sm_120), the other gfx11
(gfx1100) and gfx12 (gfx1201). Triton 3.6 doesn't compile for gfx1170 and gfx1250."""

LOOPS = """\
The 16-bit kernels at head dimensions 64 and 128. A tile is queries x keys, w warps, s stages, h heads; d sums outputs
late, l has queries on the left, p loads through pointers. Registers are per thread, shared memory (KiB) per program.
Each other cell has a number for each loop over blocks, in the order of the code: instructions of an iteration, and of
these the barriers of threads and the waits for memory or products. Spills are above."""


def installed(version: str) -> Path:
    """The folder of a version of Triton beside the one that is installed; the first call downloads it."""
    target = FOLDER / version
    if not target.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as part:  # a folder that is there is complete
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{part}/{version}"]
            subprocess.run([*pip, f"triton=={version}"], check=True)
            Path(part, version).rename(target)
    return target


def report(version: str, jobs: int) -> None:
    """Compile what is out of date under a version."""
    environment = dict(os.environ)
    if version != triton.__version__:
        paths = (str(installed(version)), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "benchmarks.compile_report", "--jobs", str(jobs)]
    subprocess.run(command, check=True, env=environment)


def page(rows: Iterable[Row]) -> str:
    """The page: how many configurations are clean, and what is wrong with the others."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row["configuration"], {})[row["triton"]] = row
    versions = sorted({version for found in by_name.values() for version in found})
    lines = [
        "# What each version of Triton makes of the kernels",
        "",
        INTRODUCTION,
        "",
        f"| GPU | {' | '.join(f'Triton {v}: 16 bits at 64, 128 | others' for v in versions)} |",
        "|---" * (1 + 2 * len(versions)) + "|",
    ]
    for gpu in SHARED_KIB:
        cells = []
        for version in versions:
            of_gpu = [r[version] for name, r in by_name.items() if f"-{gpu}-" in name and version in r]
            for common in (True, False):
                counted = [row for row in of_gpu if is_common(row["configuration"]) == common]
                clean = sum(not row["findings"] and not row["minor"] for row in counted)
                loops = sum(not row["findings"] for row in counted)
                cells.append(f"{clean} / {loops} / {len(counted)}" if counted else "")
        lines.append(f"| {gpu} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Binaries that aren't clean",
        "",
        "Spills in loops count one iteration of each loop.",
        "",
        f"| configuration | {' | '.join(versions)} |",
        "|---" * (1 + len(versions)) + "|",
    ]
    for name, found in by_name.items():
        if any(row["findings"] or row["minor"] for row in found.values()):
            cells = [verdict(found[version]) if version in found else "" for version in versions]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## Registers, shared memory and loops", "", LOOPS]
    for gpu in SHARED_KIB:
        shown = {name: found for name, found in by_name.items() if f"-{gpu}-" in name and is_64_or_128(name)}
        if shown:
            lines += ["", f"### {gpu}", "", *loop_table(shown, versions)]
    return "\n".join(lines) + "\n"


def loop_table(by_name: dict[str, dict[str, Row]], versions: list[str]) -> list[str]:
    """A table with the resources of binaries, and with what their loops hold, under each version."""
    columns = ("registers", "KiB", "instructions", "barriers", "waits")
    heads = ("configuration", "tile", *(f"{version}: {column}" for version in versions for column in columns))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in by_name.items():
        cells = [name, next(iter(found.values()))["tile"]]
        for version in versions:
            row = found.get(version, {})
            kib = f"{int(row['shared_bytes']) / 1024:.1f}" if row.get("shared_bytes") else ""
            loops = (row.get(f"loop_{column}", "") for column in columns[2:])
            cells += [row.get("registers", ""), kib, *loops]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def is_64_or_128(name: str) -> bool:
    """Return whether a configuration has 16 bits and head dimension 64 or 128."""
    return ("-d64-" in name or "-d128-" in name) and "fp32" not in name


def is_common(name: str) -> bool:
    """Return whether most models run a configuration: 16 bits, head dimension 64 or 128, the Triton backend."""
    return is_64_or_128(name) and not name.startswith("gluon")


def verdict(row: Row) -> str:
    """Return the faults of a binary."""
    return "; ".join(filter(None, (row["findings"], row["minor"]))) or "clean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args()
    for version in options.versions:
        report(version, options.jobs)
    PAGE.write_text(page(read_rows()), encoding="utf-8")
    print(f"{PAGE} written")


if __name__ == "__main__":
    main()

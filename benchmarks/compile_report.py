"""What the compiler makes of every shipped kernel configuration, on a machine without a GPU.

python -m benchmarks.compile_report [--arch sm_90] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import triton

from tritonpack.kernels.aot import TARGETS, Configuration, Resources, compile_configuration, shipped_configurations

COLUMNS = (
    f"{'configuration':34} {'M x N':>9} {'warps':>5} {'stages':>6} {'registers':>9} {'spills':>6} {'shared KiB':>10} "
    f"{'matrix':>6} {'instructions':>12}"
)


def row(configuration: Configuration, resources: Resources) -> str:
    tile = configuration.tile
    shape = f"{tile.block_m} x {tile.block_n}"
    return (
        f"{configuration!s:34} {shape:>9} {tile.num_warps:5} {tile.num_stages:6} {resources.registers:9} "
        f"{resources.spills:6} {resources.shared_bytes / 1024:10.1f} {resources.matrix_instructions:6} "
        f"{resources.instructions:12}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", choices=sorted(TARGETS), help="one architecture only")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args(arguments)
    configurations = [c for c in shipped_configurations() if options.arch in (None, c.arch)]
    print(f"Triton {triton.__version__}\n{COLUMNS}")
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for configuration, resources in zip(
            configurations, pool.map(compile_configuration, configurations), strict=True
        ):
            print(row(configuration, resources), flush=True)
            rows.append({"configuration": str(configuration), **asdict(configuration.tile), **asdict(resources)})
    spilling = sum(bool(r["spills"]) for r in rows)
    print(f"{len(rows)} configurations, {spilling} spill registers")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["triton", *rows[0]])
            writer.writeheader()
            writer.writerows({"triton": triton.__version__, **r} for r in rows)


if __name__ == "__main__":
    main()

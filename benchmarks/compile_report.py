"""Compile every shipped kernel for every architecture, without a GPU, and print registers, spills and instructions.

python -m benchmarks.compile_report [--arch sm_90] [--csv FILE] [--jobs 2]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from tests.kernels.aot import (
    Configuration,
    HopperConfiguration,
    Resources,
    compile_configuration,
    hopper_configurations,
    shipped_configurations,
)
from tritonpack.kernels.tile_shapes import TILES

COLUMNS = (
    f"{'configuration':42} {'M x N':>9} {'warps':>5} {'stages':>6} {'registers':>9} {'spills':>6} {'shared KiB':>10} "
    f"{'matrix':>6} {'instructions':>12}"
)


def attempt(configuration: Configuration | HopperConfiguration) -> Resources | str:
    """The resources of a compiled kernel, or the reason why it doesn't compile."""
    try:
        return compile_configuration(configuration)
    except Exception as error:  # a compiler may raise anything; the row has the message
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:120]}"


def row(configuration: Configuration | HopperConfiguration, resources: Resources | str) -> str:
    """A line of the table."""
    tile = configuration.tile
    name = str(configuration).replace("softcap-sinks-alibi-dropout", "features")
    begin = f"{name:42} {f'{tile.block_m} x {tile.block_n}':>9} {tile.num_warps:5} {tile.num_stages:6} "
    if isinstance(resources, str):
        return begin + resources
    return (
        f"{begin}{resources.registers:9} {resources.spills:6} {resources.shared_bytes / 1024:10.1f} "
        f"{resources.matrix_instructions:6} {resources.instructions:12}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(TILES), help="one architecture only")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args(arguments)
    shipped: list[Configuration | HopperConfiguration] = [*shipped_configurations(), *hopper_configurations()]
    configurations = [c for c in shipped if options.arch in (None, c.arch)]
    print(f"Triton {triton.__version__}, torch {torch.__version__}\n{COLUMNS}")
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for configuration, resources in zip(configurations, pool.map(attempt, configurations), strict=True):
            print(row(configuration, resources), flush=True)
            facts = {"error": resources} if isinstance(resources, str) else asdict(resources)
            rows.append({"configuration": str(configuration), **asdict(configuration.tile), **facts})
    spilling, failed = sum(bool(r.get("spills")) for r in rows), sum("error" in r for r in rows)
    print(f"{len(rows)} configurations, {spilling} spill registers, {failed} don't compile")
    if options.csv:
        names = dict.fromkeys(["triton", *(name for r in rows for name in r)])
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows({"triton": triton.__version__, **r} for r in rows)


if __name__ == "__main__":
    main()

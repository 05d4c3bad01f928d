"""Compares our packers and samplers with others in one run: the quality of their epochs, and their times.

    python -m benchmarks.packing.compare [--lengths FILE.json] [--peers DIR] [--sizes 10000 100000 1000000]
    python -m benchmarks.packing.compare --suite [--lengths FILE.json] [--peers DIR]

The first table measures plans for the given lengths (by default random ones like OpenChat's, see tests/lengths.py), on
8 ranks of 32,768 tokens over 10 epochs by default. Its columns are the fields of `PlanStatistics`, means over the
epochs; the costs are those of a Llama-3-8B. Warm is the median time that one rank takes to plan an epoch. Cold is the
time of the first call in this process, which compiles or loads machine code. (Most of axolotl's time is the garbage
collection at the end of its sampler.) Every plan is checked before its row is printed: no document is in it twice, no
row is above the capacity.

The second table has the times of packing log-normal lengths, warm, the best of three runs (one run if it takes
seconds). A packer that took more than --limit seconds gets no larger problem.

With --suite one table compares our planner with the other samplers on eleven data sets, and the last line names the
rows in which ours loses (see benchmarks/packing/suite.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.baselines import interleaved_rows, next_fit_rows, shuffled_bins
from benchmarks.packing.peers import Lengths, Packer, Sampler, load
from benchmarks.packing.suite import checked, print_suite, seconds
from tests.lengths import log_normal, lookalike
from tritonpack.packing import pack
from tritonpack.packing.bins import Algorithm
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import PlanStatistics, plan_statistics


def ours() -> list[Sampler]:
    """Our planner with each objective and tail."""

    def sampler(name: str, **options: Any) -> Sampler:
        def plan(lengths: NDArray[np.int32], capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
            return plan_epoch(lengths, capacity, ranks, seed=seed, epoch=epoch, **options)

        def from_wide(lengths: Lengths, *how: int) -> Plan:
            return plan(lengths.astype(np.int32), *how)

        return Sampler(f"tritonpack {name}", from_wide, plan, lambda lengths: lengths.astype(np.int32))

    return [
        sampler("quadratic"),
        sampler("quadratic, spread", tail="spread"),
        sampler("quadratic, keep", tail="keep"),
        sampler("linear", objective="linear"),
    ]


def our_packers() -> list[Packer]:
    """`pack` with each algorithm."""
    return [Packer(f"tritonpack {name}", partial(pack, algorithm=name)) for name in get_args(Algorithm)]


def baselines() -> list[Sampler]:
    """Simple ways to fill rows."""
    methods = (interleaved_rows, next_fit_rows, shuffled_bins)
    names = ("interleaved", "next-fit, strided", "best-fit, shuffled")
    return [Sampler(name, method, method) for name, method in zip(names, methods, strict=True)]


def print_quality(samplers: Sequence[Sampler], lengths: Lengths, options: argparse.Namespace) -> None:
    """Print the first table, one row per sampler."""
    print(
        f"\n{len(lengths):,} documents, {lengths.sum():,} tokens; "
        f"{options.ranks} ranks of {options.capacity:,} tokens, {options.epochs} epochs\n"
    )
    shown = (
        "steps",
        "efficiency",
        "utilization",
        "cost-util",
        "L2 lag",
        "L2 max",
        "spread",
        "covered",
        "warm ms",
        "cold ms",
    )
    print("| sampler | " + " | ".join(shown) + " |\n" + "|---" * (1 + len(shown)) + "|")
    for sampler in samplers:
        how = (options.capacity, options.ranks, options.seed)
        prepared = sampler.prepare(lengths)
        cold, *warm = (seconds(sampler.own_work, prepared, *how, epoch) for epoch in (0, *range(options.epochs)))
        plans = (checked(sampler.plan(lengths, *how, epoch), lengths) for epoch in range(options.epochs))
        found = [plan_statistics(plan, lengths) for plan in plans]
        names = [field.name for field in fields(PlanStatistics)]
        means = {name: fmean(getattr(one, name) or 0.0 for one in found) for name in names}
        cells = [
            f"{means['num_steps']:.4g}",
            *(f"{means[name]:.2%}" for name in ("efficiency", "utilization", "cost_utilization")),
            *(f"{means[name]:,.0f}" for name in ("l2_lag", "l2_lag_max")),
            f"{means['spread']:.2f}x",
            f"{means['tokens_covered']:.2%}",
            f"{1e3 * median(warm):,.1f}",
            f"{1e3 * cold:,.0f}",
        ]
        print(f"| {sampler.name} | " + " | ".join(cells) + " |", flush=True)


def print_times(packers: Sequence[Packer], options: argparse.Namespace) -> None:
    """Print the second table, one row per packer and one column per number of documents."""
    print(f"\nSeconds to pack log-normal lengths (mean 598, at most 8,192) into rows of {options.capacity:,} tokens\n")
    print("| packer | " + " | ".join(f"{size:,}" for size in options.sizes) + " |")
    print("|---|" + "---|" * len(options.sizes))
    for packer in packers:
        packer.pack(packer.prepare(log_normal(1000)), options.capacity)  # compiled
        cells: list[str] = []
        best = 0.0
        for size in options.sizes:
            if best > options.limit:
                cells.append("")
                continue
            prepared = packer.prepare(log_normal(size))
            best = seconds(packer.pack, prepared, options.capacity)
            for _ in range(2 if best < 2 else 0):
                best = min(best, seconds(packer.pack, prepared, options.capacity))
            cells.append(f"{best:.2g}")
        print(f"| {packer.name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a JSON list of token counts")
    parser.add_argument("--peers", type=Path, help="a folder with the peers' modules, see benchmarks/packing/peers.py")
    parser.add_argument("--capacity", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000], help="ascending")
    parser.add_argument("--suite", action="store_true", help="compare on eleven data sets instead")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per data set and seed of the suite")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds")
    options = parser.parse_args()
    peers = load(options.peers)
    lengths = lookalike()
    if options.lengths is not None:
        lengths = np.array(json.loads(options.lengths.read_text(encoding="utf-8")), dtype=np.int64)
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}, {os.cpu_count()} cores"
    )
    print("Absent: " + ("; ".join(f"{name} ({why})" for name, why in peers.absent.items()) or "none"))
    if options.suite:
        print_suite(peers.samplers, lengths, options)
        return
    print_quality([*ours(), *baselines(), *peers.samplers], lengths, options)
    print_times([*our_packers(), *peers.packers], options)


if __name__ == "__main__":
    main()

"""Compares our planner with other samplers in one run: the quality of their epochs, and their times.

    python -m benchmarks.packing.compare [--lengths FILE.json] [--peers DIR]
    python -m benchmarks.packing.compare --suite [--lengths FILE.json] [--peers DIR]

The table measures plans for the given lengths (by default random ones like OpenChat's, see tests/lengths.py), on
8 ranks of 32,768 tokens over 10 epochs by default. Its columns are fields of `PlanStatistics`, means over the epochs;
the costs are a Llama-3-8B's. The last one is the least time in which one rank plans an epoch, warm; samplers
take turns. (Most of axolotl's time is the garbage collection at the end of its sampler.) Every plan is checked before
its row is printed: no document is in it twice, no row is above the capacity.

With --suite the table compares our planner with the other samplers on eleven data sets, and the last line names
the rows in which ours loses (see benchmarks/packing/suite.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.peers import Lengths, Sampler, load
from benchmarks.packing.suite import OURS, data_sets, losses, print_table
from tests.lengths import lookalike
from tritonpack.cli.plan import next_fit_rows
from tritonpack.packing import pack
from tritonpack.packing.planning.plan import Plan, plan_epoch


def interleaved_rows(lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int) -> Plan:
    """Rows of as many documents as fit if all are padded to the longest, each step's dealt out to ranks by length.

    The multipack project compares its samplers with this way.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).astype(np.int32)
    per_step = num_ranks * (capacity // int(lengths.max()))
    left = len(order) % per_step
    order = order[: len(order) - left * (left < num_ranks)]
    position = np.arange(len(order))
    step = position // per_step
    order = order[np.lexsort((lengths[order], step))]
    row = step * num_ranks + position % num_ranks
    offsets = np.cumsum([0, *np.bincount(row, minlength=-(-len(order) // per_step) * num_ranks)])
    return Plan(order[np.argsort(row, kind="stable")], offsets, num_ranks, capacity)


def shuffled_bins(lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int) -> Plan:
    """The whole epoch packed at once by best-fit-decreasing; the rows are shuffled."""
    packing = pack(lengths, capacity)
    rows = np.random.default_rng([seed, epoch]).permutation(packing.num_bins)
    bins = [packing[row] for row in rows[: len(rows) // num_ranks * num_ranks]]
    offsets = np.cumsum([0, *map(len, bins)])
    return Plan(np.concatenate([*bins, np.zeros(0, np.int32)]), offsets, num_ranks, capacity)


def in_order(lengths: Lengths, capacity: int, num_ranks: int, seed: int, epoch: int) -> Plan:
    """Rows filled in order; a document that doesn't fit begins a new row."""
    return next_fit_rows(lengths, capacity, num_ranks, seed=[seed, epoch])


def ours(name: str = OURS, **options: Any) -> Sampler:
    """Our planner as the sampler runs it."""

    def prepare(lengths: Lengths) -> NDArray[np.int32]:
        return lengths.astype(np.int32)

    def plan(lengths: NDArray[np.int32], capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
        return plan_epoch(lengths, capacity, ranks, seed=seed, epoch=epoch, **options)

    return Sampler(name, lambda lengths, *how: plan(prepare(lengths), *how), plan, prepare)


def all_of_ours() -> list[Sampler]:
    """Our planner with each objective and tail, and simple ways to fill rows."""
    return [
        ours("tritonpack quadratic"),
        ours("tritonpack quadratic, spread", tail="spread"),
        ours("tritonpack quadratic, keep", tail="keep"),
        ours("tritonpack linear", objective="linear"),
        Sampler("interleaved", interleaved_rows, interleaved_rows),
        Sampler("next-fit, strided", in_order, in_order),
        Sampler("best-fit, shuffled", shuffled_bins, shuffled_bins),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a JSON list of token counts")
    parser.add_argument("--peers", type=Path, help="a folder with the peers' modules, see benchmarks/packing/peers.py")
    parser.add_argument("--capacity", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", action="store_true", help="compare on eleven data sets instead")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns")
    options = parser.parse_args()
    peers, absent = load(options.peers)
    lengths = lookalike()
    if options.lengths is not None:
        lengths = np.array(json.loads(options.lengths.read_text(encoding="utf-8")), dtype=np.int64)
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}, {os.cpu_count()} cores"
    )
    print("Absent: " + ("; ".join(f"{name} ({why})" for name, why in absent.items()) or "none"))
    if options.suite:
        found = print_table(data_sets(lengths), [ours(), *peers], options, seeds=5, whole=False)
        print(losses(found))
        return
    name = f"{len(lengths):,} documents, {lengths.sum():,} tokens"
    given = {name: (options.capacity, lambda epoch: lengths)}
    print_table(given, [*all_of_ours(), *peers], options, seeds=options.epochs, whole=True)


if __name__ == "__main__":
    main()

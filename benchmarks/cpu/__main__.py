"""Time what needs no GPU: packing, masks, patches, attention, the host's time of a layer on a GPU.

    python -m benchmarks.cpu [--out DIR] [-k WORDS] [--table]

Attention is measured beside sdpa, padded and with a dense mask. Rows are appended to DIR/cpu.csv, and printed as a
table. `-k` chooses the cases whose module, function, benchmark or parameters hold all of the words. `--table` measures
nothing and prints the latest rows of the file. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.harness.ledger import RESULTS, Ledger, environment, read
from benchmarks.harness.registry import selected
from benchmarks.harness.run import Budget, run, table

MODULES = (
    "packing.planning", "packing.trees", "cpu.masks", "cpu.patch", "cpu.host", "cpu.attention", "cpu.trees",
    "cpu.padded_batches",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of cpu.csv")
    parser.add_argument("-k", dest="words", default="", help="chooses cases, such as 'attention flan'")
    parser.add_argument("--table", action="store_true", help="print the latest rows and measure nothing")
    options = parser.parse_args(arguments)
    path = options.out / "cpu.csv"
    if options.table:
        print(*table(read(path)), sep="\n")
        return
    for name in MODULES:
        try:
            import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            print(f"benchmarks.{name} is left out: {error}")
    cases = selected(options.words)
    if not cases:
        parser.error(f"-k {options.words!r} chooses no case.")
    device = torch.device("cpu")
    ledger = Ledger(path, environment(device))
    run(cases, ledger, Budget(60 * 24), device)
    chosen = {(benchmark, case.text) for case in cases for benchmark in case.benchmarks}
    print("", *table(row for row in ledger.rows() if (row["benchmark"], row["case"]) in chosen), sep="\n")
    print(f"\nRows: {path}")


if __name__ == "__main__":
    main()

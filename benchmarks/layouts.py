"""Count how even layouts are, and how many keys ranks need of each other.

    python -m benchmarks.layouts [--tokens 32768 131072] [--ranks 4 8 16 64] [--packs 40]

- pairs: the visible pairs of the busiest rank, divided by the mean over ranks.
- rows: the same of the rows that ranks own.
- keys: how many keys of other ranks the rows of a rank see, on the rank with most. The exchange "group_cast" receives
  as many in each layer; "all_gather" and "ring" receive all rows of the others, whatever the mask.

Each cell has the mean over the batches that were drawn, and the worst batch.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import get_args

import numpy as np

from tests.lengths import fill, packs
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import make_layout
from tritonpack.parallel.layouts import LayoutName
from tritonpack.testing.cases import parents_of

MEASURES = {"pairs": "{:.2f}", "rows": "{:.2f}", "keys": "{:,.0f}"}


def batches(tokens: int, count: int) -> Iterator[tuple[str, BlockDiagonalMask]]:
    """Names of masks with `count` batches each but for the single documents."""
    for name, lengths in packs(tokens, count):
        yield name, BlockDiagonalMask.from_seqlens(lengths)
    yield "one document, window 1,024", BlockDiagonalMask.from_seqlens([tokens], window=(1023, 0))
    for seed in range(count):
        rng = np.random.default_rng(seed)
        lengths = fill(np.maximum(rng.lognormal(np.log(8000), 1.0, 64 + tokens // 1000), 1), tokens)
        yield "median 8,000", BlockDiagonalMask.from_seqlens(lengths)
        yield "median 8,000, window 1,024", BlockDiagonalMask.from_seqlens(lengths, window=(1023, 0))
        trees: list[list[tuple[int, int]]] = []
        while sum(length for tree in trees for _, length in tree) < tokens:
            prompt, *completions = rng.integers(100, 1500, 9).tolist()
            trees.append([(-1, prompt), *((0, length) for length in completions)])
        yield "prompts with 8 completions", BlockDiagonalMask.from_tree(parents_of(*trees)[:tokens])


def measure(tokens: int, ranks: int, count: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Batch -> measure -> layout -> the number of each batch that was drawn."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for name, mask in batches(tokens, count):
        for one in get_args(LayoutName):
            layout = make_layout(one, mask, ranks)
            found[name]["pairs"][one].append(layout.imbalance(mask))
            found[name]["rows"][one].append(max(layout.lengths) * ranks / layout.num_rows)
            found[name]["keys"][one].append(max(layout.remote_keys(mask)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--packs", type=int, default=40, help="batches to draw of each distribution")
    options = parser.parse_args()
    layouts = get_args(LayoutName)
    print(f"{'batch':28}{'tokens':>10}{'ranks':>6}{'':>7}" + "".join(f"{layout:>20}" for layout in layouts))
    for tokens in options.tokens:
        for ranks in options.ranks:
            for name, measures in measure(tokens, ranks, options.packs).items():
                for what, form in MEASURES.items():
                    drawn = measures[what]
                    cells = (f"{form.format(np.mean(drawn[one]))} / {form.format(max(drawn[one]))}" for one in layouts)
                    row = "".join(f"{cell:>20}" for cell in cells)
                    print(f"{name:28}{tokens:10,}{ranks:6}{what:>7}{row}", flush=True)


if __name__ == "__main__":
    main()

"""Count how even layouts are: the visible pairs of the busiest rank, divided by the mean over ranks.

    python -m benchmarks.layouts [--tokens 32768 131072] [--ranks 4 8 16 64] [--packs 40]

Each cell has the mean over the batches that were drawn, and the worst batch.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import get_args

import numpy as np

from tests.lengths import packs
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import make_layout
from tritonpack.parallel.layouts import LayoutName


def imbalances(tokens: int, ranks: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Lengths -> layout -> the imbalance of each batch."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, lengths in packs(tokens, count):
        mask = BlockDiagonalMask.from_seqlens(lengths)
        for layout in get_args(LayoutName):
            found[name][layout].append(make_layout(layout, mask, ranks).imbalance(mask))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--packs", type=int, default=40, help="batches to draw of each distribution")
    options = parser.parse_args()
    layouts = get_args(LayoutName)
    print(f"{'lengths':28}{'tokens':>9}{'ranks':>7}" + "".join(f"{layout:>16}" for layout in layouts))
    for tokens in options.tokens:
        for ranks in options.ranks:
            for name, drawn in imbalances(tokens, ranks, options.packs).items():
                cells = (f"{np.mean(drawn[one]):.2f} / {max(drawn[one]):.2f}" for one in layouts)
                print(f"{name:28}{tokens:9,}{ranks:7}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

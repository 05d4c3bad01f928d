"""The picture of what `benchmarks.parallel.simulate` wrote: imbalance by layout, predicted times by exchange.

python -m benchmarks.parallel.draw [--tokens 131072] [--out docs/images/exchange-and-layout.png]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.parallel.simulate import BANDWIDTHS, LOG_NORMAL, ONE, RESULTS

INK = "#333333"
# Okabe and Ito's colours, which people with any common colour vision can tell apart.
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"color": "#D55E00", "marker": "o"},
    "zigzag": {"color": "#E69F00", "marker": "s"},
    "stripe": {"color": "#56B4E9", "marker": "^", "markersize": 9, "markerfacecolor": "white"},
    "balanced": {"color": "#0072B2", "marker": "D"},
}
SCHEMES: dict[str, dict[str, Any]] = {
    "all_gather contiguous": {"color": "#D55E00", "marker": "o", "linestyle": "--"},
    "ring contiguous": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "ring balanced": {"color": "#56B4E9", "marker": "^", "markersize": 9, "markerfacecolor": "white"},
    "all_gather balanced": {"color": "#0072B2", "marker": "D"},
    "ulysses contiguous": {"color": "#009E73", "marker": "v"},
}
STYLE: dict[str, Any] = {"linewidth": 1.6, "markersize": 5}


def read(path: Path, tokens: int) -> list[dict[str, str]]:
    """The rows of one size of batch."""
    with path.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if int(row["tokens"]) == tokens]


def draw(imbalance: list[dict[str, str]], times: list[dict[str, str]], tokens: int, path: Path) -> None:
    """A column per distribution of lengths: how even pairs are, how many blocks are visited, and times per network."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(13, 14), dpi=110, layout=layout)
    figure.suptitle(
        f"{tokens:,} tokens shared by more and more ranks: how even the work is, and what a model predicts",
        fontsize=15,
        color=INK,
    )
    columns = [*LOG_NORMAL, ONE]
    grid = figure.subplots(2 + len(BANDWIDTHS), len(columns), sharey="row", sharex=True)
    for column, name in enumerate(columns):
        pairs, blocks, *clocks = grid[:, column]
        rows = [row for row in imbalance if row["lengths"] == name]
        for axes, field in ((pairs, "pairs_mean"), (blocks, "blocks_mean")):
            for one, style in LAYOUTS.items():
                mine = [row for row in rows if row["layout"] == one]
                axes.plot([int(r["ranks"]) for r in mine], [float(r[field]) for r in mine], label=one, **STYLE | style)
        for axes, network in zip(clocks, BANDWIDTHS, strict=True):
            mine = [row for row in times if row["lengths"] == name and row["network"] == network]
            for one, style in SCHEMES.items():
                known = [(int(row["ranks"]), float(row[one])) for row in mine if row[one]]
                axes.plot(*zip(*known, strict=True), label=one.replace(" ", ", "), **STYLE | style)
        pairs.set_title(f"documents: {name}" if name != ONE else name, fontsize=12)
        clocks[-1].set_xlabel("ranks")
    for axes, what in zip(
        grid[:, 0],
        (
            "visible pairs, computed exactly\nmost loaded rank over mean",
            "128 x 128 blocks, counted\nmost loaded rank over even share",
            *(f"predicted ms a step, not measured\n{network}" for network in BANDWIDTHS),
        ),
        strict=True,
    ):
        axes.set_ylabel(what)
    grid[0, 0].legend(title="layout", frameon=False)
    grid[2, 0].legend(title="exchange, layout", frameon=False, fontsize=9)
    for axes in figure.axes:
        _dress(axes, [int(row["ranks"]) for row in imbalance])
    figure.text(
        0.5,
        -0.02,
        "Attention and its exchange, forward and backward, of a Llama-3-8B's 32 layers in bfloat16 at 400 TFLOP/s. "
        "Ulysses ends where ranks outnumber the 32 query heads.\n"
        "Chunks of the balanced layout have 128 rows at least, a tile of the kernels: with 128 rows per rank, at 1,024 "
        "ranks, it is the contiguous one.",
        ha="center",
        fontsize=10,
        color=INK,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def _dress(axes: Axes, ranks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(set(ranks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _nice() if low <= tick <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelbottom=True, labelleft=True)
    axes.title.set_color(INK)


def _nice() -> list[float]:
    return [digit * 10.0**power for power in range(6) for digit in (1, 2, 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--out", type=Path, default=Path("docs/images/exchange-and-layout.png"))
    options = parser.parse_args()
    imbalance = read(options.results / "layout-imbalance.csv", options.tokens)
    times = read(options.results / "exchange-times.csv", options.tokens)
    if not imbalance or not times:
        parser.error(f"{options.results} has no rows for {options.tokens:,} tokens; run benchmarks.parallel.simulate.")
    draw(imbalance, times, options.tokens, options.out)


if __name__ == "__main__":
    main()
